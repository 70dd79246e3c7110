from __future__ import annotations

import sys

import bench_decode
import pytest


def test_without_transformers_it_names_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert bench_decode.main([]) == 1
    assert "--no-transformers" in capsys.readouterr().err
