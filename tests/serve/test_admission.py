"""Bounds on the queue, and deadlines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kdray.serve.engine import RequestDelta
from tests.serve.conftest import BuildApp
from tests.serve.fakes import MAX_MODEL_LEN, FakeEngine, running, steps
from tests.serve.http import chat, complete, events


def while_open(app: FastAPI, engine: FakeEngine, **members: Any) -> httpx.Response:
    """A completion that comes while another one, of prompt "hello", never ends."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://kdray") as client:
            first = asyncio.create_task(
                client.post("/v1/completions", content=json.dumps({"prompt": "hello"}))
            )
            await engine.waiting.wait()
            body = json.dumps({"prompt": "hi"} | members)
            response = await client.post("/v1/completions", content=body)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            return response

    return asyncio.run(run())


def first_never_ends(*parts: str) -> FakeEngine:
    return FakeEngine(lambda i: steps("b") if i else running(*parts))


@pytest.mark.parametrize(
    ("limits", "figure"),
    [
        ({"max_queued_choices": 1}, "1 outputs are queued"),
        ({"max_queued_tokens": 6}, "5 prompt tokens are queued, 2 more"),
        ({"max_open_choices": 1}, "1 outputs are open"),
    ],
)
def test_a_full_queue_says_when_to_come_again(
    app_of: BuildApp, limits: dict[str, int], figure: str
) -> None:
    engine = first_never_ends()
    response = while_open(app_of(engine, **limits), engine)
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_requests")
    assert figure in error["message"]
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("limits", [{"max_queued_choices": 1}, {"max_queued_tokens": 6}])
def test_who_has_a_token_waits_no_longer(app_of: BuildApp, limits: dict[str, int]) -> None:
    engine = first_never_ends("a")
    assert while_open(app_of(engine, **limits), engine).status_code == 200


def test_what_has_ended_leaves_its_place(app_of: BuildApp) -> None:
    app = app_of(FakeEngine(steps("a")), max_queued_choices=1, max_queued_tokens=2)
    assert [complete(app).status_code for _ in range(3)] == [200] * 3


def test_more_tokens_than_an_empty_queue_holds_are_a_mistake(app_of: BuildApp) -> None:
    response = complete(app_of(FakeEngine(), max_queued_tokens=3), prompt="four")
    assert response.status_code == 400
    assert "4 prompt tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize("make", [complete, chat])
def test_a_text_that_cannot_fit_is_refused_unread(app_of: BuildApp, make: Any) -> None:
    text = "a" * (MAX_MODEL_LEN + 1)  # of bytes that are a token each
    member = (
        {"prompt": text} if make is complete else {"messages": [{"role": "user", "content": text}]}
    )
    engine = FakeEngine(steps("a"))
    response = make(app_of(engine), **member)
    assert response.status_code == 400 and engine.submitted == []
    assert f"takes {MAX_MODEL_LEN}" in response.json()["error"]["message"]


def let_an_hour_pass() -> None:
    """On the clock of the event loop."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + 3600.0  # type: ignore[method-assign]


class SlowEngine(FakeEngine):
    """Takes an hour behind each step of its script."""

    async def outputs(self, request_id: str) -> AsyncIterator[RequestDelta]:
        async for delta in super().outputs(request_id):
            yield delta
            let_an_hour_pass()


@pytest.mark.parametrize("asked", [{"timeout_s": 600}, {}])
def test_a_request_that_takes_too_long(app_of: BuildApp, asked: dict[str, float]) -> None:
    engine = SlowEngine(running("a"))
    response = complete(app_of(engine, deadline_s=None if asked else 600.0), **asked)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert engine.aborted == [engine.submitted[0][0]]


def test_a_stream_that_takes_too_long_ends_with_an_error(app_of: BuildApp) -> None:
    engine = SlowEngine(running("a"))
    response = complete(app_of(engine), stream=True, timeout_s=600)
    assert response.status_code == 200
    told = [block for block in response.text.split("\n\n") if block.startswith("data: ")]
    first, last = [json.loads(block.removeprefix("data: ")) for block in told]
    assert first["choices"][0]["text"] == "a"
    assert last["error"]["code"] == "deadline_exceeded"
    assert engine.aborted == [engine.submitted[0][0]]


def test_a_client_cannot_lengthen_the_server_s_time(app_of: BuildApp) -> None:
    response = complete(app_of(SlowEngine(running("a")), deadline_s=600.0), timeout_s=36_000)
    assert response.status_code == 408


@pytest.mark.parametrize("timeout", [0, -1, "soon", 1e9])
def test_a_wrong_timeout_names_itself(app_of: BuildApp, timeout: Any) -> None:
    response = complete(app_of(FakeEngine()), timeout_s=timeout)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "timeout_s"


def test_time_enough_changes_nothing(app_of: BuildApp) -> None:
    app = app_of(FakeEngine(steps("a", "b")), deadline_s=3600.0)
    assert complete(app, timeout_s=60).json()["choices"][0]["text"] == "ab"
    assert len(events(complete(app, stream=True))) == 3


def test_the_wait_follows_the_queue_and_the_pace(app_of: BuildApp) -> None:
    app = app_of(FakeEngine())
    counts = app.state.surface.counts
    assert counts.retry_after_s() == 1.0
    counts._last_seconds.extend([4.0, 8.0])
    counts.open_choices, counts.queued_choices = 8, 6
    assert counts.retry_after_s() == 6.0 * 6 / 2
    counts.queued_choices, counts.open_choices = 600, 602
    assert counts.retry_after_s() == 60.0


def test_a_failed_output_frees_its_place(app_of: BuildApp) -> None:
    failing = RequestDelta(token_ids=(), finish_reason="error", error="no finite logit")
    app = app_of(FakeEngine([failing]), max_queued_choices=1)
    assert [complete(app).status_code for _ in range(3)] == [500] * 3
