"""How often a gang may be started again, and how long to wait before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kdray.config import FaultPolicy


class RestartBudget:
    """At most policy.max_restarts within policy.window_s.

    A fault that a restart does not mend would otherwise load the model over and over.
    """

    def __init__(self, policy: FaultPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._taken: deque[float] = deque()

    def take(self) -> float | None:
        """Seconds to wait before the next restart; None where there may be none."""
        policy, now = self._policy, self._clock()
        while self._taken and now - self._taken[0] > policy.window_s:
            self._taken.popleft()
        before = len(self._taken)
        if before >= policy.max_restarts:
            return None
        self._taken.append(now)
        return 0.0 if before == 0 else policy.backoff_s * 2.0 ** (before - 1)
