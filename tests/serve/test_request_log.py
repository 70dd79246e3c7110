"""One line a request, and nothing secret in it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.serve.conftest import BuildApp
from tests.serve.fakes import FakeEngine, running, steps
from tests.serve.http import complete


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.message) for r in caplog.records if r.name == "kdray.requests"]


def test_a_line_a_request(app_of: BuildApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kdray.requests")
    app = app_of(FakeEngine(lambda i: steps("abc", "de") if i else running("secret.")))
    answer = complete(app, prompt="private", n=2, stop=".").json()
    [line] = lines(caplog)
    assert line["id"] == answer["id"]
    assert (line["outputs"], line["prompt_tokens"], line["completion_tokens"]) == (2, 14, 12)
    assert line["finish_reasons"] == ["length", "stop"]
    assert line["accept_length_mean"] == 2.0
    assert line["total_ms"] >= line["ttft_ms"] >= 0 and line["tpot_ms"] >= 0
    assert "secret" not in caplog.text and "private" not in caplog.text


def test_a_request_that_never_began(app_of: BuildApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kdray.requests")
    engine = FakeEngine()
    engine.refuse = RuntimeError("no")
    complete(app_of(engine))
    [line] = lines(caplog)
    assert line["ttft_ms"] is None and line["tpot_ms"] is None
    assert line["finish_reasons"] == ["error"]
