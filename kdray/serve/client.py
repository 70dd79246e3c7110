"""An engine client over the driver actor: one call to submit, one stream for all outputs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, Self, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from kdray.core.events import EventCounters
from kdray.core.request import SamplingParams
from kdray.driver.step_loop import DriverStats
from kdray.errors import EngineClosed, KdrayError, RankFailed
from kdray.serve.calls import call_apart
from kdray.serve.engine import EngineInfo, RequestDelta
from kdray.serve.profiles import DriverProfiles

log = logging.getLogger("kdray.serve")
Result = TypeVar("Result")
# One entry a request: id, tokens, accept length, finish reason, error.
StepMessage = list[tuple[str, tuple[int, ...], int | None, str | None, str | None]]
Stream = AsyncIterator[Awaitable[StepMessage]]


class DriverClient:
    """Speaks to one driver actor from one event loop; `await DriverClient.connect(handle)`.

    A single task reads the driver's stream, one message a step, and hands every request its own
    part. When the stream ends, every open request ends with an error, as lost, and `healthy` says
    why.
    """

    def __init__(self, driver: ActorHandle[Any], info: EngineInfo, stream: Stream) -> None:
        self._driver = driver
        self._info = info
        self.events = EventCounters()
        self.profiles = DriverProfiles(driver)
        self._queues: dict[str, asyncio.Queue[RequestDelta]] = {}
        self._asking: dict[str, asyncio.Future[Any]] = {}  # submits without an answer yet
        self._failure: str | None = None
        self._stream = stream
        self._reader: asyncio.Task[None] = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, driver: ActorHandle[Any]) -> Self:
        info = EngineInfo.from_mapping(await _result(driver.info.remote()))
        stream: Stream = driver.outputs.options(num_returns="streaming").remote()
        await _result(await _result(anext(stream)))  # it begins: what is submitted now is in it
        return cls(driver, info, stream)

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        delivered: Sequence[int] = (),
    ) -> None:
        """delivered: output that a driver before this one gave already; outputs go on behind it."""
        if self._failure is not None:
            raise EngineClosed(self._failure)
        self._queues[request_id] = asyncio.Queue()  # first: outputs may overtake the answer
        arguments = (request_id, tuple(prompt), sampling, tuple(delivered))
        asking = asyncio.ensure_future(_result(call_apart(self._driver.submit, *arguments)))
        self._asking[request_id] = asking
        asking.add_done_callback(lambda _: self._asking.pop(request_id, None))  # ids are used once
        try:
            await asyncio.shield(asking)  # who waits no longer has asked all the same
        except Exception:
            self._queues.pop(request_id, None)
            raise

    async def outputs(self, request_id: str) -> AsyncIterator[RequestDelta]:
        queue = self._queues.get(request_id)
        while queue is not None:
            delta = await queue.get()
            if delta.finish_reason is not None:
                self._queues.pop(request_id, None)
                queue = None
            yield delta

    async def abort(self, request_id: str) -> None:
        self._queues.pop(request_id, None)
        asking = self._asking.get(request_id)
        if asking is not None:  # Ray may run the later call first, which would find nothing
            await asyncio.wait({asking})
        if self._failure is None:
            await _result(call_apart(self._driver.abort, request_id))

    async def stats(self) -> DriverStats:
        return DriverStats(**await _result(self._driver.stats.remote()))

    def healthy(self) -> str | None:
        return self._failure

    async def close(self) -> None:
        """Stop reading; the driver itself is left as it is."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        """Hand out step messages until the stream ends, then fail what is open."""
        cause = "the driver closed its output stream"
        try:
            async for message in self._stream:
                self._hand_out(await message)
        except asyncio.CancelledError:
            cause = "the client was closed"
            raise
        except Exception as error:
            cause = f"the engine failed: {_unwrapped(error)}"
            log.warning("the driver's output stream ended: %s", cause)
            log.debug("in full", exc_info=error)
        finally:
            self._fail(cause)

    def _hand_out(self, message: StepMessage) -> None:
        for request_id, token_ids, accept_length, finish_reason, error in message:
            queue = self._queues.get(request_id)
            if queue is None:
                continue  # aborted: its last steps were on their way
            queue.put_nowait(
                RequestDelta(
                    token_ids=tuple(token_ids),
                    accept_length=accept_length,
                    finish_reason=finish_reason,
                    error=error,
                )
            )

    def _fail(self, cause: str) -> None:
        """Queues stay until they are read: a reader may not have begun."""
        self._failure = cause
        lost = RequestDelta(token_ids=(), finish_reason="error", error=cause, lost=True)
        for queue in self._queues.values():
            queue.put_nowait(lost)


async def _result(call: Awaitable[Any]) -> Any:
    """A remote call's result; its own exception where it raised one of kdray's."""
    try:
        return await call
    except (RayTaskError, RayActorError) as error:
        raise _unwrapped(error) from None


def _unwrapped(error: Exception) -> Exception:
    if isinstance(error, RayTaskError) and isinstance(error.cause, KdrayError):
        return error.cause
    if isinstance(error, RayTaskError):
        # Ray's own text holds the whole traceback of the other process.
        return RankFailed(f"{type(error.cause).__name__}: {error.cause}")
    if isinstance(error, RayActorError):
        # Ray's own text tells clients of processes and addresses: it is for the log.
        return EngineClosed("the driver actor died; the supervisor's log says why")
    return error
