"""Keeps one engine running: watches its gang, ends it as a whole when it is broken, starts another.

It lives in a process of its own, on a CPU, with no model and nothing that can hang in a device: who
watches must not be stuck with who is watched. Requests are not its business: whoever submitted them
has what is needed to submit them again (kdray.serve.replay).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import Any

from ray.actor import ActorHandle

from kdray.actors.gang import Gang
from kdray.actors.placement import Placement
from kdray.actors.restarts import RestartBudget
from kdray.actors.room import Room
from kdray.actors.watchdog import Fault, FaultKind, fault_of
from kdray.config import EngineConfig
from kdray.errors import EngineClosed, KdrayError, RankFailed
from kdray.logs import show_logs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """One gang in the life of an engine.

    number   from 0, one more with every restart
    driver   the driver actor of this gang
    info     what it said of itself (kdray.actors.driver_actor.DriverActor.info)
    hangs    gangs before it that were given up because they hung
    cause    what ended the gang before it; empty for the first
    """

    number: int
    driver: ActorHandle[Any]
    info: dict[str, Any]
    hangs: int
    cause: str = ""


class Supervisor:
    """An asyncio actor that owns the gang: its ranks end when this process does, however it does.

    `room` is kept over all restarts, so that the ranks find their GPUs again, and given back at the
    end where it is the engine's own.
    """

    def __init__(self, config: EngineConfig, placement: Placement, room: Room) -> None:
        show_logs()
        self._config = config
        self._placement = placement
        self._room = room
        self._gang: Gang | None = None
        self._current: Incarnation | None = None
        self._ended: KdrayError | None = None
        self._hangs = 0
        self._changed = asyncio.Condition()
        self._lost: asyncio.Event = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        """The first gang; returns its info. Raises what Gang.start raises: nothing is tried twice
        that never worked."""
        gang = await self._start_gang()
        await self._set_up(gang, number=0)
        self._keeping = asyncio.create_task(self._keep_or_give_up(gang))
        return gang.info

    async def incarnation(self, after: int = -1) -> Incarnation:
        """The first one behind number `after` that is up; waits for it through restarts.

        Raises EngineClosed after stop(), and RankFailed with the cause once the engine is given up.
        """
        async with self._changed:
            while True:
                if self._ended is not None:
                    raise self._ended
                if self._current is not None and self._current.number > after:
                    return self._current
                await self._changed.wait()

    async def lost(self, number: int) -> None:
        """A client lost that incarnation's stream; where it is still the current one, it goes."""
        if self._current is not None and self._current.number == number:
            self._lost.set()

    async def pids(self) -> dict[int, int]:
        """The process of each rank of the gang that is up; none while there is none."""
        return self._gang.pids if self._current is not None and self._gang is not None else {}

    async def stop(self) -> None:
        """Let the running step finish and end everything. Idempotent."""
        await self._end(EngineClosed("the engine was stopped"))
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        gang, self._gang = self._gang, None
        if gang is not None:
            await asyncio.to_thread(gang.stop)
        self._room.release()

    async def _keep_or_give_up(self, gang: Gang) -> None:
        """Whatever fails here must not leave requests waiting for a gang that nobody starts."""
        try:
            await self._keep(gang)
        except Exception as error:
            _log.exception("the supervisor failed")
            await self._give_up(f"the supervisor failed: {type(error).__name__}: {error}")

    async def _keep(self, gang: Gang) -> None:
        """Until the engine is given up."""
        budget, number = RestartBudget(self._config.faults), 0
        while True:
            fault = await self._fault_of(gang)
            self._current = None  # whoever asks now waits for the next one
            self._hangs += fault.kind is FaultKind.HUNG
            _log.warning("incarnation %d is broken: %s", number, fault.cause)
            await asyncio.to_thread(gang.kill)
            cause = fault.cause
            while (delay := budget.take()) is not None:
                await asyncio.sleep(delay)
                try:
                    gang = await self._start_gang()
                    break
                except Exception as error:
                    cause = f"{fault.cause}; started again: {error}"
                    _log.warning("a restart failed: %s", error)
            else:
                policy = self._config.faults
                spent = f"after {policy.max_restarts} restarts within {policy.window_s:g} s"
                await self._give_up(f"{cause} (given up {spent})")
                return
            number += 1
            await self._set_up(gang, number, fault.cause)
            _log.warning("incarnation %d is up", number)

    async def _fault_of(self, gang: Gang) -> Fault:
        """What the watchdog finds, or a client's word that the driver's stream has ended."""
        watching = asyncio.create_task(fault_of(gang, self._config.faults))
        told = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait({watching, told}, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():  # it mostly finds the reason a moment later
                await asyncio.wait({watching}, timeout=self._config.faults.pulse_every_s + 1.0)
            if watching.done():
                return watching.result()
            return Fault(kind=FaultKind.FAILED, cause="a client lost the driver's output stream")
        finally:
            watching.cancel()
            told.cancel()

    async def _start_gang(self) -> Gang:
        """A gang that leaves the room to the next one."""
        room = replace(self._room, owned=False)
        starting = asyncio.to_thread(Gang.start, self._config, self._placement, room)
        self._gang = await _uncancelled(starting)
        return self._gang

    async def _set_up(self, gang: Gang, number: int, cause: str = "") -> None:
        self._lost.clear()
        async with self._changed:
            self._current = Incarnation(
                number=number, driver=gang.driver, info=gang.info, hangs=self._hangs, cause=cause
            )
            self._changed.notify_all()

    async def _give_up(self, cause: str) -> None:
        _log.error("the engine is given up: %s", cause)
        gang, self._gang = self._gang, None
        if gang is not None:
            await asyncio.to_thread(gang.kill)
        await self._end(RankFailed(cause))
        self._room.release()

    async def _end(self, error: KdrayError) -> None:
        async with self._changed:
            self._current = None
            self._ended = self._ended or error
            self._changed.notify_all()


async def _uncancelled(work: Any) -> Any:
    """A thread's work cannot be cancelled: wait for what it made, then go."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            gang = await task
            await asyncio.to_thread(gang.kill)
        raise
