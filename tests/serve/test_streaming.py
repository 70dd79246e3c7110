"""Streams: one chunk a step, a finish, the usage where asked, [DONE]."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Send

from kdray.serve import streaming
from kdray.serve.engine import RequestDelta
from tests.serve.conftest import BuildApp
from tests.serve.fakes import FakeEngine, running, steps
from tests.serve.http import chat, complete, events

PARTS = ("h", "ell", "o")


def deltas(chunks: list[Any]) -> list[Any]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def test_a_chat_stream(app_of: BuildApp) -> None:
    response = chat(app_of(FakeEngine(steps(*PARTS, finish="stop"))), stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response)
    assert deltas(chunks) == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "ell"},
        {"content": "o"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_speculative_steps_carry_their_accept_length(app_of: BuildApp) -> None:
    chunks = events(chat(app_of(FakeEngine(steps(*PARTS))), stream=True))
    assert [chunk.get("kdray") for chunk in chunks] == [
        None,
        None,
        {"accept_length": 3},
        {"accept_length": 1},
        None,
    ]


def test_a_text_stream_with_echo(app_of: BuildApp) -> None:
    chunks = events(complete(app_of(FakeEngine(steps(*PARTS))), echo=True, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hi", "h", "ell", "o", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


def test_usage_comes_last_and_without_choices(app_of: BuildApp) -> None:
    app = app_of(FakeEngine(steps(*PARTS)))
    chunks = events(complete(app, stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "kdray": {"accept_length_mean": 2.0, "steps": 2},
    }


def test_usage_so_far_in_every_chunk(app_of: BuildApp) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    app = app_of(FakeEngine(steps(*PARTS)))
    chunks = events(complete(app, stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 4, 5, 5, 5]


def test_a_stream_says_what_the_whole_says(app_of: BuildApp) -> None:
    app = app_of(FakeEngine(steps("one t", "wo", " three")))
    whole = complete(app, stop="w", n=2).json()["choices"]
    chunks = events(complete(app, stop="w", n=2, stream=True))
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(choice["text"] for choice in mine) == whole[index]["text"] == "one t"
        assert mine[-1]["finish_reason"] == whole[index]["finish_reason"] == "stop"


def test_every_choice_of_a_stream_opens_and_finishes(app_of: BuildApp) -> None:
    engine = FakeEngine(lambda i: steps(*"abc"[: i + 1]))
    choices = [chunk["choices"][0] for chunk in events(chat(app_of(engine), n=3, stream=True))]
    for index, text in enumerate(["a", "ab", "abc"]):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]


def test_a_stop_string_ends_the_stream_and_aborts(app_of: BuildApp) -> None:
    engine = FakeEngine(running("ab", "cd", "ef"))
    chunks = events(chat(app_of(engine), stop="bc", stream=True))
    assert "".join(d.get("content", "") for d in deltas(chunks)) == "a"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert engine.aborted == [engine.submitted[0][0]]


def test_an_error_after_the_first_byte_is_the_last_event(app_of: BuildApp) -> None:
    failing = RequestDelta(token_ids=(), finish_reason="error", error="rank 3 died")
    engine = FakeEngine(lambda i: [*running("a"), failing] if i == 0 else running("b"))
    response = chat(app_of(engine), n=2, stream=True)
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    last = response.text.strip().split("\n\n")[-1]
    assert last.startswith('data: {"error":') and "rank 3 died" in last
    assert engine.aborted == [engine.submitted[1][0]]  # the other choice must not run on


def test_a_silent_stream_is_kept_alive(app_of: BuildApp, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, commented, send_part = FakeEngine(), asyncio.Event(), streaming._send_part

    async def send(receiver: Send, body: bytes) -> None:
        await send_part(receiver, body)
        if body.startswith(b":"):
            commented.set()

    async def outputs(_: str) -> AsyncIterator[RequestDelta]:
        await commented.wait()
        yield steps("a")[0]

    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(streaming, "_send_part", send)
    engine.outputs = outputs  # type: ignore[method-assign]
    blocks = complete(app_of(engine), stream=True).text.split("\n\n")
    assert blocks[0] == ": waiting"
    told = [block for block in blocks if block.startswith("data: ")]
    assert len(told) == 3 and told[-1] == "data: [DONE]"
