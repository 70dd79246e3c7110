"""Where a step's time goes: seconds by verb."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kdray.profiling.recorder import Recorder

VERBS = ("draft", "build", "verify", "accept", "commit")


class StageClock:
    """Adds up wall-clock seconds a verb; `schedule` is the time outside the five.

    Of rounds that run ahead on the device the host sees two stages: `launch`, and `wait`, until the
    tokens of the one before are there. Every stage is a range of the recorder's as well.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.seconds: dict[str, float] = dict.fromkeys((*VERBS, "schedule", "launch", "wait"), 0.0)
        self._recorder = recorder

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self._recorder.range(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start
