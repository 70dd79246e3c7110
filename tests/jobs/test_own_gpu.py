"""What a rank's process is shown: one GPU, of those that are to be seen here."""

from __future__ import annotations

import os

import pytest
from own_gpu import VISIBLE, own_gpu


@pytest.mark.parametrize("seen, rank, shown", [
    (None, 1, "1"), ("4,6", 0, "4"), ("4,6", 1, "6"), ("4,6", 2, ""), ("", 0, ""),
])  # fmt: skip
def test_one_gpu_is_shown(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, rank: int, shown: str
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if seen is not None:
        monkeypatch.setenv(VISIBLE, seen)
    with own_gpu(rank):
        assert os.environ[VISIBLE] == shown
    assert os.environ.get(VISIBLE) == seen
