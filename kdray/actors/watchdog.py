"""Finds out that a gang is broken: a process that ended, a step that failed, a step that hangs."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayError, RayTaskError

from kdray.actors.gang import Gang
from kdray.config import FaultPolicy
from kdray.driver.watch import Pulse

_SETTLE_S = 0.5  # a death is seen elsewhere first, as a broken connection: wait for the cause
_ASK_S = 2.0
Result = TypeVar("Result")


class FaultKind(enum.IntEnum):
    """What is broken, the most telling first: others follow from it."""

    DIED = 1
    HUNG = 2
    FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: FaultKind
    cause: str


async def fault_of(gang: Gang, policy: FaultPolicy) -> Fault:
    """Waits for as long as the gang is well; then what ails it. Needs no answer of who hangs."""
    watches = [
        _driver_fault(gang),
        _hang(gang, policy),
        *(_rank_fault(rank, run) for rank, run in enumerate(gang.runs, start=1)),
    ]
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done, _ = await asyncio.wait(tasks, timeout=_SETTLE_S)
    finally:
        for task in tasks:
            task.cancel()
    faults = sorted((task.result() for task in done), key=lambda fault: fault.kind)
    told = [fault.cause for fault in faults if fault.kind is faults[0].kind]
    return Fault(kind=faults[0].kind, cause="; ".join(told))


async def _driver_fault(gang: Gang) -> Fault:
    try:
        cause: str | None = await _answer(gang.driver.ended.remote())
    except RayError as error:
        return Fault(kind=FaultKind.DIED, cause=f"the process of rank 0 ended{_why(error)}")
    return Fault(kind=FaultKind.FAILED, cause=f"rank 0: {cause or 'it stopped by itself'}")


async def _rank_fault(rank: int, run: Any) -> Fault:
    try:
        await _answer(run)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return Fault(kind=FaultKind.FAILED, cause=f"rank {rank}: {type(cause).__name__}: {cause}")
    except RayError as error:
        return Fault(kind=FaultKind.DIED, cause=f"the process of rank {rank} ended{_why(error)}")
    return Fault(kind=FaultKind.FAILED, cause=f"rank {rank} stopped by itself")


async def _hang(gang: Gang, policy: FaultPolicy) -> Fault:
    """Asks rank 0 again and again; in a hung step its answers say so, from another thread."""
    while True:
        await asyncio.sleep(policy.pulse_every_s)
        try:
            async with asyncio.timeout(policy.pulse_timeout_s):
                pulse: Pulse = await _answer(gang.driver.pulse.remote())
        except TimeoutError:
            cause = f"rank 0 has not answered for {policy.pulse_timeout_s:g} s"
            return Fault(kind=FaultKind.HUNG, cause=cause)
        except RayError:
            await asyncio.Event().wait()  # it has ended, and _driver_fault says why
            raise
        if pulse.is_late:
            cause = (
                f"a step has taken {pulse.in_step_s:.1f} s of {pulse.deadline_s:.1f} s allowed"
                f"{await _standing(gang)}"
            )
            return Fault(kind=FaultKind.HUNG, cause=cause)


async def _standing(gang: Gang) -> str:
    """How far the other ranks are, for whoever reads the log."""
    ranks = list(enumerate(gang.verifiers, start=1))
    said = await asyncio.gather(*(_steps(verifier) for _, verifier in ranks))
    parts = [
        f"rank {rank} does not answer" if steps is None else f"rank {rank} has done {steps} steps"
        for (rank, _), steps in zip(ranks, said, strict=True)
    ]
    return "".join(f", {part}" for part in parts)


async def _steps(verifier: Any) -> int | None:
    try:
        async with asyncio.timeout(_ASK_S):
            steps: int = await _answer(verifier.steps.remote())
            return steps
    except (TimeoutError, RayError):
        return None


async def _answer(call: Awaitable[Result]) -> Result:
    """An actor call's result; a coroutine, as asyncio's own tools want one."""
    return await call


def _why(error: RayError) -> str:
    """What Ray knows of a death; its own text is long, and mostly of what might have been."""
    if isinstance(error, OutOfMemoryError):
        return " (Ray ended it because its node ran out of memory)"
    return " (its node died)" if isinstance(error, NodeDiedError) else ""
