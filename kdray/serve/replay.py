"""An engine client that outlives gangs: it keeps what it takes to submit every open request again.

A lost request goes on behind the tokens that its reader has already got. The token at a position is
a function of its prefix and the request's seed, so nothing that was said is contradicted, and the
whole is what an undisturbed engine would have said.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from kdray.actors.supervisor import Incarnation
from kdray.core.events import EventCounters
from kdray.core.request import SamplingParams
from kdray.driver.step_loop import DriverStats
from kdray.errors import EngineClosed, GangError, KdrayError
from kdray.serve.calls import call_apart
from kdray.serve.client import DriverClient
from kdray.serve.engine import EngineInfo, ProfileControl, RequestDelta

log = logging.getLogger("kdray.serve")


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """The client of one incarnation."""

    number: int
    client: DriverClient


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended: what it asked, with its seed, and what its reader has got.

    link   where it was submitted last; None: nowhere yet
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    delivered: list[int] = field(default_factory=list)
    link: _Link | None = None


class ReplayingClient:
    """Speaks to whichever gang a supervisor has up; `await ReplayingClient.connect(supervisor)`.

    While a gang is started again, requests wait, new ones too, and `healthy` says nothing is wrong.
    Once the supervisor has given up, all of them end with EngineClosed and the cause.
    """

    def __init__(self, supervisor: ActorHandle[Any], first: Incarnation, link: _Link) -> None:
        self.events = EventCounters()
        self._supervisor = supervisor
        self._link = link
        self._hangs = first.hangs
        self._failure: str | None = None
        self._before = DriverStats()  # totals of gangs before, as far as they were asked for
        self._stats = DriverStats()  # of this one, likewise
        self._open: dict[str, _Open] = {}
        self._changed = asyncio.Condition()
        self._following = asyncio.create_task(self._follow())

    @classmethod
    async def connect(cls, supervisor: ActorHandle[Any]) -> Self:
        """Raises EngineClosed or RankFailed where there is no engine any more."""
        first = await _ask(supervisor, after=-1)
        return cls(supervisor, first, await _linked(first))

    @property
    def info(self) -> EngineInfo:
        return self._link.client.info

    @property
    def profiles(self) -> ProfileControl:
        return self._link.client.profiles

    async def submit(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        if sampling.seed is None:  # the next gang must draw what this one would have drawn
            sampling = replace(sampling, seed=secrets.randbits(63))
        request = _Open(prompt=tuple(prompt), sampling=sampling)
        self._open[request_id] = request
        try:
            await self._submit(request_id, request)
        except BaseException:
            self._open.pop(request_id, None)
            raise

    async def outputs(self, request_id: str) -> AsyncIterator[RequestDelta]:
        """As EngineClient.outputs. Raises EngineClosed where the engine is given up meanwhile."""
        while (request := self._open.get(request_id)) is not None:
            assert request.link is not None, "submit comes first"
            async for delta in request.link.client.outputs(request_id):
                if delta.lost:
                    break
                request.delivered += delta.token_ids
                if delta.finish_reason is not None:
                    self._open.pop(request_id, None)
                    self.events.add("broken_requests_total", delta.finish_reason == "error")
                yield delta
            else:
                return  # it ended, or was aborted
            await self._replay(request_id, request)

    async def abort(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        await self._link.client.abort(request_id)

    async def stats(self) -> DriverStats:
        """Totals go on over restarts, save what a gang did since it was last asked.

        Raises EngineClosed or GangError while there is no gang.
        """
        if self._failure is not None:
            raise EngineClosed(self._failure)
        link = self._link
        stats = await link.client.stats()
        if link is self._link:
            self._stats = stats
        return stats.behind(self._before)

    def healthy(self) -> str | None:
        return self._failure

    async def close(self) -> None:
        """Stop reading; the engine is left as it is."""
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._link.client.close()

    async def _replay(self, request_id: str, request: _Open) -> None:
        """Submit a lost request again, behind what was delivered of it."""
        if self._open.get(request_id) is not request:
            return  # aborted meanwhile
        await self._submit(request_id, request)
        self.events.add("replayed_requests_total")
        self.events.add("replayed_tokens_total", len(request.delivered))

    async def _submit(self, request_id: str, request: _Open) -> None:
        """To the gang that is up, or to the next one that takes it."""
        lost = request.link
        while True:
            link = self._link if self._link is not lost else await self._next(lost)
            request.link = link
            try:
                await link.client.submit(
                    request_id, request.prompt, request.sampling, request.delivered
                )
                return
            except (EngineClosed, GangError):
                lost = link

    async def _next(self, lost: _Link | None) -> _Link:
        """The link behind a lost one. Raises EngineClosed where there will be none."""
        if lost is not None and self._failure is None:
            call_apart(self._supervisor.lost, lost.number)
        async with self._changed:
            await self._changed.wait_for(lambda: self._link is not lost or self._failure)
        if self._failure is not None:
            raise EngineClosed(self._failure)
        return self._link

    async def _follow(self) -> None:
        """One gang after another, until the supervisor has no more."""
        try:
            while True:
                incarnation = await _ask(self._supervisor, after=self._link.number)
                try:
                    link = await _linked(incarnation)
                except Exception:  # gone already: the next one is on its way
                    link = replace(self._link, number=incarnation.number)
                self._count(incarnation)
                await self._change(link)
        except asyncio.CancelledError:
            self._failure = "the client was closed"
            raise
        except Exception as error:
            self._failure = str(error)
            log.error("no engine any more: %s", error)
        finally:
            await self._change(self._link)

    async def _change(self, link: _Link) -> None:
        before, self._link = self._link, link
        if before is not link:
            self._before, self._stats = self._stats.behind(self._before), DriverStats()
        async with self._changed:
            self._changed.notify_all()
        if before.client is not link.client:
            await before.client.close()

    def _count(self, incarnation: Incarnation) -> None:
        restarts = incarnation.number - self._link.number
        self.events.add("restarts_total", restarts)
        self.events.add("watchdog_expirations_total", incarnation.hangs - self._hangs)
        self._hangs = incarnation.hangs
        log.warning(
            "the engine is up again: incarnation %d, %d requests to go on with; what ended the one "
            "before: %s",
            incarnation.number,
            len(self._open),
            incarnation.cause,
        )


async def _linked(incarnation: Incarnation) -> _Link:
    return _Link(incarnation.number, await DriverClient.connect(incarnation.driver))


async def _ask(supervisor: ActorHandle[Any], after: int) -> Incarnation:
    """Raises kdray's own errors, and EngineClosed where the supervisor itself is gone."""
    try:
        incarnation: Incarnation = await supervisor.incarnation.remote(after)
        return incarnation
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, KdrayError) else error) from None
    except RayActorError:
        raise EngineClosed("the engine's supervisor is gone") from None
