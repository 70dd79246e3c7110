"""How long a step may take, learnt from the steps before it; read by who is not in the step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kdray.config import FaultPolicy

_REMEMBERED = 256  # steps
_SLOW = 0.9  # the quantile that stands for a slow step: one hiccup does not move it
_RELEARNT = 16  # steps between two looks at what is remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """How an engine gets on, at one moment.

    steps        steps done since the start
    in_step_s    seconds since the running step began; None between steps
    deadline_s   seconds a step may take now
    """

    steps: int
    in_step_s: float | None
    deadline_s: float

    @property
    def is_late(self) -> bool:
        return self.in_step_s is not None and self.in_step_s > self.deadline_s


class StepWatch:
    """Times the steps of one thread; pulse() may be called from any other.

    It judges nothing and ends nothing: a thread that hangs cannot help itself.
    """

    def __init__(
        self,
        policy: FaultPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy or FaultPolicy()
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._slow = 0.0  # seconds of a slow step
        self._steps = 0
        self._began: float | None = None
        self._deadline = self._policy.start_floor_s

    @contextmanager
    def step(self, floor_s: float = 0.0) -> Iterator[None]:
        """Around one step. Raising counts as its end: the failure has its own way out.

        floor_s   it may take so long at least, whatever was learnt
        """
        self._deadline = max(self._allowed(), floor_s)
        began = self._began = self._clock()
        try:
            yield
        finally:
            self._began = None
            self._learn(self._clock() - began)

    def pulse(self) -> Pulse:
        began = self._began
        return Pulse(
            steps=self._steps,
            in_step_s=None if began is None else self._clock() - began,
            deadline_s=self._deadline,
        )

    def _allowed(self) -> float:
        policy = self._policy
        starting = self._steps < policy.start_steps
        floor = max(policy.step_floor_s, policy.start_floor_s if starting else 0.0)
        return max(floor, policy.step_multiple * self._slow)

    def _learn(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._steps += 1
        if self._steps <= _RELEARNT or self._steps % _RELEARNT == 0:
            ordered = sorted(self._seconds)
            self._slow = ordered[int(_SLOW * (len(ordered) - 1))]
