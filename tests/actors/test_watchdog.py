"""The watchdog over scripted ranks: which of several signs it takes for the cause."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError, RayTaskError

from kdray.actors.watchdog import Fault, FaultKind, fault_of
from kdray.config import FaultPolicy
from kdray.driver.watch import Pulse
from tests.serve.test_client import Handle

POLICY = FaultPolicy(pulse_every_s=0.01)  # and patience: a pulse that comes is never too late
WELL = Pulse(steps=7, in_step_s=0.5, deadline_s=20.0)
LATE = Pulse(steps=7, in_step_s=21.0, deadline_s=20.0)


async def for_ever() -> Any:
    await asyncio.Event().wait()


async def raising(error: Exception) -> Any:
    raise error


async def after(seconds: float, work: Awaitable[Any]) -> Any:
    await asyncio.sleep(seconds)
    return await work


async def answering(value: Any) -> Any:
    return value


def failed(message: str) -> RayTaskError:
    return RayTaskError("run", message, RuntimeError(message))


class Rank:
    """A verifier that says its steps, or nothing."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps

    async def steps(self) -> int:
        return await for_ever() if self._steps is None else self._steps


class Driver:
    def __init__(self, ended: Awaitable[Any] | None, pulse: Pulse | None) -> None:
        self._ended, self._pulse = ended, pulse

    async def ended(self) -> str | None:
        return await (self._ended or for_ever())

    async def pulse(self) -> Pulse:
        return self._pulse or await for_ever()


def find(
    *,
    ended: Awaitable[Any] | None = None,
    pulse: Pulse | None = WELL,
    run: Awaitable[Any] | None = None,
    steps: int | None = 3,
    policy: FaultPolicy = POLICY,
) -> Fault:
    gang: Any = SimpleNamespace(
        driver=Handle(Driver(ended, pulse)),
        verifiers=[Handle(Rank(steps))],
        runs=[run or for_ever()],
    )

    async def bounded() -> Fault:
        async with asyncio.timeout(20):
            return await fault_of(gang, policy)

    return asyncio.run(bounded())


def test_a_death_is_the_cause_though_its_effect_shows_first() -> None:
    ended = answering("RuntimeError: connection closed by peer")
    fault = find(ended=ended, run=after(0.1, raising(ActorDiedError())))
    assert fault == Fault(kind=FaultKind.DIED, cause="the process of rank 1 ended")


def test_a_driver_that_died_is_named_beside_ranks_that_lost_it() -> None:
    run = raising(failed("connection reset"))
    fault = find(ended=after(0.1, raising(ActorDiedError())), run=run)
    assert fault == Fault(kind=FaultKind.DIED, cause="the process of rank 0 ended")


def test_an_error_in_a_step_is_told_as_it_was() -> None:
    fault = find(ended=answering("OutOfMemoryError: CUDA out of memory"))
    assert fault.kind is FaultKind.FAILED
    assert fault.cause == "rank 0: OutOfMemoryError: CUDA out of memory"
    fault = find(run=raising(failed("NCCL error")))
    assert fault.cause == "rank 1: RuntimeError: NCCL error"


def test_a_rank_that_leaves_by_itself_is_a_fault_too() -> None:
    assert find(run=answering(12)).cause == "rank 1 stopped by itself"
    assert find(ended=answering(None)).cause == "rank 0: it stopped by itself"


def test_a_late_step_says_who_is_behind() -> None:
    fault = find(pulse=LATE, steps=41)
    assert fault.kind is FaultKind.HUNG
    assert fault.cause == ("a step has taken 21.0 s of 20.0 s allowed, rank 1 has done 41 steps")


def test_a_rank_that_does_not_say_how_far_it_is_is_named() -> None:
    assert find(pulse=LATE, steps=None).cause.endswith("rank 1 does not answer")


def test_a_rank_0_that_does_not_answer_is_hung() -> None:
    fault = find(pulse=None, policy=replace(POLICY, pulse_timeout_s=0.1))
    assert fault == Fault(kind=FaultKind.HUNG, cause="rank 0 has not answered for 0.1 s")
