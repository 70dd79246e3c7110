"""Health by progress: when an engine is given up, on a clock that the test holds."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kdray.driver.step_loop import DriverStats
from kdray.errors import EngineClosed
from kdray.serve.progress import ProgressWatch
from tests.serve.fakes import FakeEngine

BUSY = DriverStats(running=1, waiting=2, steps=5)


class Engine(FakeEngine):
    """Says the stats it is given; None: gives no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.said: DriverStats | None = BUSY

    async def stats(self) -> DriverStats:
        if self.said is None:
            raise EngineClosed("starting again")
        return self.said


class Watched:
    """A watch with 60 s of patience over an engine; looked at after so many seconds."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.now = 0.0
        self._watch = ProgressWatch(60.0, clock=lambda: self.now)

    def after(self, seconds: float) -> str | None:
        self.now += seconds
        return asyncio.run(self._watch.cause(self.engine))


def test_steps_are_progress() -> None:
    watched = Watched()
    for steps in range(6, 10):
        watched.engine.said = replace(BUSY, steps=steps)
        assert watched.after(59.0) is None
        assert watched.after(59.0) is None


def test_work_without_steps_is_not() -> None:
    watched = Watched()
    assert watched.after(10.0) is None
    assert watched.after(60.0) is None
    cause = watched.after(1.0)
    assert cause == "no step for 61 s, and the engine has 3 requests open"


def test_an_idle_engine_may_stand_still() -> None:
    watched = Watched()
    watched.engine.said = DriverStats(steps=5)
    assert watched.after(1000.0) is None and watched.after(1000.0) is None
    watched.engine.said = BUSY  # work has just come
    assert watched.after(59.0) is None
    assert watched.after(2.0) is not None


def test_a_restart_is_waited_for_and_an_answer_that_never_comes_is_not() -> None:
    watched = Watched()
    watched.engine.said = None
    assert watched.after(59.0) is None
    watched.engine.said = replace(BUSY, steps=0)
    assert watched.after(2.0) is None
    watched.engine.said = None
    assert watched.after(60.0) is None
    assert watched.after(1.0) == "no step for 61 s, and the engine gives no answer"


def test_a_failure_is_said_at_once() -> None:
    watched = Watched()
    watched.engine.cause = "rank 1 died"
    assert watched.after(0.0) == "rank 1 died"
