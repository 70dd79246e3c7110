"""A uvicorn that writes a driver's steps as server-sent events and does nothing else.

It parses, checks, counts, detokenizes and logs nothing: what an endpoint's latency is held against.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import uvicorn

from kdray.core.request import SamplingParams
from kdray.serve.client import DriverClient

_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


class BareApp:
    """The ASGI application. Not the actor itself: uvicorn would take its wrapped methods for
    factories."""

    def __init__(self, client: DriverClient) -> None:
        self._client = client
        self._numbers = itertools.count()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads(await _body(receive))
        name = f"bare-{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True)
        await self._client.submit(f"{name}-0", [1], sampling)
        await send(_START)
        event = f'data: {{"id": "{name}", "kdray": {{}}}}\n\n'.encode()
        async for _ in self._client.outputs(f"{name}-0"):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class BareEndpoint:
    """An actor: `start`, then a POST anywhere on the port is answered with one event a step."""

    def __init__(self, driver: Any, port: int) -> None:
        self._driver = driver
        self._port = port

    async def start(self) -> None:
        """Returns once it listens; it then does so until the actor is killed."""
        app = BareApp(await DriverClient.connect(self._driver))
        config = uvicorn.Config(app, port=self._port, lifespan="off", log_level="warning")
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.05)
            if self._serving.done():
                self._serving.result()


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body
