"""An engine on Ray asked through kdray's own endpoint, in this process and without HTTP.

So a line of a batch means what the same request means to the server, errors included.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from batch_lines import Answer, Line
from fastapi import FastAPI

from kdray.actors.placement import Placement
from kdray.actors.supervised import SupervisedEngine
from kdray.config import EngineConfig
from kdray.model.tokenizer import Tokenizer
from kdray.serve.app import ServeLimits, build_app
from kdray.serve.engine import EngineClient, RequestDelta
from kdray.serve.replay import ReplayingClient

BUSY_PAUSE_S = 0.5
_LIMITS = ServeLimits(max_body_bytes=64 << 20)


class TokenTap:
    """An engine client that remembers the tokens of each request until they are taken.

    All else is the engine's own.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._tokens: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def outputs(self, request_id: str) -> AsyncIterator[RequestDelta]:
        tokens = self._tokens.setdefault(request_id, [])
        async for delta in self._engine.outputs(request_id):
            tokens.extend(delta.token_ids)
            yield delta

    def take(self, response_id: str) -> list[int]:
        """The tokens of a response's first output; all that is known of the response goes."""
        own = [name for name in self._tokens if name.startswith(f"{response_id}-")]
        taken = {name: self._tokens.pop(name) for name in own}
        return taken.get(f"{response_id}-0", [])


class Offline:
    """Answers lines; `model` is the id that their bodies may name."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, model: str) -> None:
        self._tap: Any = TokenTap(engine)
        self._app = build_app(self._tap, tokenizer, model, _LIMITS)

    async def answer(self, line: Line) -> Answer:
        """Waits where the engine's queue is full."""
        while True:
            status, parts = await _call(self._app, line.path, line.body, lambda part: None)
            if status != 429:
                break
            await asyncio.sleep(BUSY_PAUSE_S)
        body = json.loads(parts)
        return Answer(status=status, body=body, token_ids=self._tap.take(str(body.get("id"))))

    async def stream(self, line: Line, show: Callable[[str], None]) -> Answer:
        """As answer(), for a chat or a text; `show` gets the text as it comes."""
        reader = _EventReader(show)
        body = line.body | {"stream": True, "stream_options": {"include_usage": True}}
        status, parts = await _call(self._app, line.path, body, reader.feed)
        if status != 200:
            return Answer(status=status, body=json.loads(parts))
        whole = reader.whole()
        return Answer(
            status=200 if "error" not in whole else 500,
            body=whole,
            token_ids=self._tap.take(str(whole.get("id"))),
        )

    def healthy(self) -> str | None:
        return self._tap.healthy()

    async def stats(self) -> dict[str, Any]:
        return asdict(await self._tap.stats())


class _EventReader:
    """Server-sent events to the object of a request that did not stream."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._text = ""
        self._last: dict[str, Any] = {}
        self._finish: str | None = None

    def feed(self, part: bytes) -> None:
        for written in part.split(b"\n\n"):
            data = written.removeprefix(b"data: ")
            if data.startswith(b"{"):
                self._chunk(json.loads(data))

    def whole(self) -> dict[str, Any]:
        choice = {"index": 0, "text": self._text, "finish_reason": self._finish}
        return self._last | {"choices": [choice]}

    def _chunk(self, chunk: dict[str, Any]) -> None:
        self._last = chunk
        for choice in chunk.get("choices", ()):
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            self._finish = choice["finish_reason"] or self._finish
            self._text += text
            self._show(text)


@asynccontextmanager
async def offline(
    config: EngineConfig, placement: Placement, served_name: str | None
) -> AsyncIterator[Offline]:
    """An engine on the running Ray cluster, for as long as this is entered."""
    engine = await asyncio.to_thread(SupervisedEngine.start, config, placement)
    try:
        client = await ReplayingClient.connect(engine.supervisor)
        tokenizer = Tokenizer.from_folder(engine.info["model_folder"], engine.info["load_format"])
        yield Offline(client, tokenizer, served_name or engine.info["name"])
        await client.close()
    finally:
        engine.stop()


async def _call(
    app: FastAPI, path: str, body: dict[str, Any], on_part: Callable[[bytes], None]
) -> tuple[int, bytes]:
    """One POST through the ASGI application: its status and all of its body."""
    status, parts, pending = 500, bytearray(), [json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        await asyncio.Event().wait()  # this client never leaves
        raise AssertionError

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.extend(message.get("body", b""))
            on_part(message.get("body", b""))

    await app(_scope(path), receive, send)
    return status, bytes(parts)


def _scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"kdray")],
        "client": ("127.0.0.1", 0),
        "server": ("kdray", 80),
    }
