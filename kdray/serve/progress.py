"""Health by progress: an engine with work must make steps; that it answers is not enough."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kdray.driver.step_loop import DriverStats
from kdray.serve.engine import EngineClient

ANSWER_S = 10.0


class ProgressWatch:
    """Looked at now and then, says why an engine must be given up, or None.

    stall_s   longest time with work and without a step; longer than any single step or restart
    clock     seconds
    """

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._steps: int | None = None
        self._moved_at = clock()

    async def cause(self, engine: EngineClient) -> str | None:
        """None while the engine is well."""
        failure = engine.healthy()
        if failure is not None:
            return failure
        stats = await _stats(engine)
        if stats is not None and self._moved(stats):
            self._moved_at = self._clock()
            return None
        still = self._clock() - self._moved_at
        if still <= self._stall_s:
            return None
        said = "gives no answer" if stats is None else f"has {_work(stats)} requests open"
        return f"no step for {still:.0f} s, and the engine {said}"

    def _moved(self, stats: DriverStats) -> bool:
        """Whether there was a step since the last look, or nothing to do."""
        before, self._steps = self._steps, stats.steps
        return before != stats.steps or _work(stats) == 0


async def _stats(engine: EngineClient) -> DriverStats | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await engine.stats()
    except Exception:  # whatever it is, it is no progress
        return None


def _work(stats: DriverStats) -> int:
    return stats.running + stats.waiting
