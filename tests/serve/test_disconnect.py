"""A client that leaves: its engine requests are aborted, exactly once, streaming or not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from fastapi import FastAPI

from kdray.serve.failure import ClientLeft
from kdray.serve.streaming import unless_client_leaves
from tests.serve.conftest import BuildApp
from tests.serve.fakes import FakeEngine, running, steps
from tests.serve.http import call, served, wait_until

BODY = b'{"prompt": "hi", "n": 2, "stream": %s}'


def open_request(address: str, stream: bool) -> socket.socket:
    """A request on its own connection, with its answer unread."""
    host, port = address.removeprefix("http://").split(":")
    body = BODY % (b"true" if stream else b"false")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + body)
    return connection


def aborted_as_submitted(engine: FakeEngine) -> bool:
    return sorted(engine.aborted) == sorted(name for name, _, _ in engine.submitted)


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_aborts_every_choice_once(app_of: BuildApp, stream: bool) -> None:
    engine = FakeEngine(running("a"))
    app = app_of(engine)
    with served(app) as address:
        connection = open_request(address, stream)
        wait_until(lambda: len(engine.submitted) == 2 and engine.waiting.is_set())
        assert engine.aborted == []
        connection.close()
        wait_until(lambda: len(engine.aborted) >= 2)
        wait_until(lambda: 'finish_reason="abort"} 2' in call(app, "GET", "/metrics").text)
    assert aborted_as_submitted(engine)


@pytest.mark.parametrize("stream", [True, False])
def test_cancellation_from_outside_aborts_too(app_of: BuildApp, stream: bool) -> None:
    """What Ray Serve does when its client leaves: it cancels the call of the application."""
    engine = FakeEngine(running("a"))
    asyncio.run(_cancelled_call(app_of(engine), engine, stream))
    assert len(engine.submitted) == 2
    assert aborted_as_submitted(engine)


async def _cancelled_call(app: FastAPI, engine: FakeEngine, stream: bool) -> None:
    call = asyncio.create_task(_raw_call(app, stream))
    await engine.waiting.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def _raw_call(app: FastAPI, stream: bool) -> None:
    body = iter([{"type": "http.request", "body": BODY % (b"true" if stream else b"false")}])

    async def receive() -> Any:
        for message in body:
            return message
        await asyncio.Event().wait()

    async def send(_: Any) -> None:
        pass

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)


def test_a_finished_request_is_not_aborted(app_of: BuildApp) -> None:
    engine = FakeEngine(steps("a", "b"))
    with served(app_of(engine)) as address:
        connection = open_request(address, stream=True)
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(4096)
        connection.close()
    assert engine.aborted == []


def test_work_has_cleaned_up_when_the_client_is_reported_gone() -> None:
    events: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            events.append("cleaned up")

    async def receive() -> Any:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientLeft):
        asyncio.run(unless_client_leaves(receive, work()))
    assert events == ["cleaned up"]


def test_leaving_while_the_engine_is_asked_aborts_what_it_may_have_taken(app_of: BuildApp) -> None:
    engine = FakeEngine()
    asked: list[str] = []

    async def submit(request_id: str, *_: Any) -> None:
        asked.append(request_id)
        engine.waiting.set()
        await asyncio.Event().wait()

    engine.submit = submit  # type: ignore[method-assign]
    asyncio.run(_cancelled_call(app_of(engine), engine, stream=False))
    assert len(asked) == 2
    assert sorted(engine.aborted) == sorted(asked)
