"""How the engine gets on, in a line now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

_log = logging.getLogger(__name__)
PERIOD_S = 10.0


class Figures(Protocol):
    """What a line needs of kdray.driver.step_loop.DriverStats."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def pages_used(self) -> int: ...
    @property
    def pages_total(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def accept_lengths(self) -> Mapping[int, int]: ...
    @property
    def stage_seconds(self) -> Mapping[str, float]: ...


class StepLog:
    """Told of every step, it writes at most a line a period, about the steps since the last."""

    def __init__(
        self, period_s: float = PERIOD_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._period_s = period_s
        self._clock = clock
        self._since = clock()
        self._before: Figures | None = None

    def stepped(self, now: Figures) -> None:
        """The clock is all that is looked at while the period runs."""
        seconds = self._clock() - self._since
        if self._before is None:
            self._before = now
        if seconds < self._period_s:
            return
        if now.steps > self._before.steps:
            _log.info("%s", line_of(self._before, now, seconds))
        self._since, self._before = self._clock(), now


def line_of(before: Figures, now: Figures, seconds: float) -> str:
    """The steps between two moments."""
    steps = now.steps - before.steps
    tokens = now.generated_tokens - before.generated_tokens
    stages = {
        verb: (spent - before.stage_seconds.get(verb, 0.0)) * 1000 / steps
        for verb, spent in now.stage_seconds.items()
    }
    parts = ", ".join(f"{verb} {ms:.1f}" for verb, ms in stages.items() if ms >= 0.05)
    return (
        f"step {now.steps}: {now.running} running, {now.waiting} waiting, "
        f"{now.pages_used}/{now.pages_total} pages, {tokens / seconds:.0f} tokens/s, "
        f"accept length {_mean_length(before, now)}, {sum(stages.values()):.1f} ms a step ({parts})"
    )


def _mean_length(before: Figures, now: Figures) -> str:
    gained = {
        length: count - before.accept_lengths.get(length, 0)
        for length, count in now.accept_lengths.items()
    }
    steps = sum(gained.values())
    total = sum(length * count for length, count in gained.items())
    return f"{total / steps:.2f}" if steps else "-"
