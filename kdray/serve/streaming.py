"""Server-sent events, and noticing that a client left."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kdray.serve.deadline import Deadline
from kdray.serve.failure import ClientLeft, failure_of
from kdray.serve.generation import Generation

Result = TypeVar("Result")
Chunk = Mapping[str, Any]
log = logging.getLogger("kdray.serve")

KEEP_ALIVE_S = 15.0  # proxies drop connections that stay silent; a queue or a long prompt may
# Made once: json.dumps with arguments makes one for every call.
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back otherwise
]


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`; where the client leaves first, cancel it and raise ClientLeft.

    The request's body must have been read. On return, and on cancellation from outside, `work`
    has ended and cleaned up.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A generation's chunks as server-sent events, ended by `[DONE]`; comments keep it alive.

    The generation starts before the status is sent, so a request that is refused still gets its
    own status; what fails later becomes an `error` event, the last one.
    """

    def __init__(
        self,
        generation: Generation,
        chunks: Callable[[Generation], AsyncIterator[Chunk]],
        *,
        deadline: Deadline,
        refused: Callable[[str], None],
    ) -> None:
        """refused is told the code of an error that came too late for a status."""
        super().__init__(media_type="text/event-stream")
        self._generation = generation
        self._chunks = chunks
        self._deadline = deadline
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_client_leaves(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        async with AsyncExitStack() as stack:
            async with self._deadline.scope():
                await stack.enter_async_context(self._generation)
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            comments = asyncio.create_task(_comment(send))
            try:
                async with self._deadline.scope():
                    async for chunk in self._chunks(self._generation):
                        await _send_part(send, _event(chunk))
                await _send_part(send, DONE)
            except OSError:
                raise ClientLeft from None
            except Exception as error:
                await self._tell(send, error)
            finally:
                comments.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tell(self, send: Send, error: Exception) -> None:
        """An error behind the first byte, as the last event."""
        failure = failure_of(error)
        if failure.is_news:
            log.error("a stream failed after its first byte", exc_info=error)
        self._refused(failure.code or "other")
        await _send_part(send, _event(failure.body()))


async def _comment(send: Send) -> None:
    """Lines that clients skip, for as long as the stream lasts."""
    with suppress(OSError):
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            await _send_part(send, b": waiting\n\n")


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(value: Chunk) -> bytes:
    return f"data: {_json(value)}\n\n".encode()
