"""A line in a job's own log for each restart of its engine; the rest is in the endpoint's log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError


class RestartLines:
    """Asks a supervisor for what came after its first gang; waits for nothing."""

    def __init__(self, supervisor: Any) -> None:
        self._supervisor = supervisor
        self._next = supervisor.incarnation.remote(0)

    def new(self) -> Iterator[str]:
        """Of the restarts since the last call; none of an engine that is given up."""
        while ray.wait([self._next], timeout=0)[0]:
            try:
                incarnation = ray.get(self._next)
            except RayError:  # the endpoint's health says it, with the cause
                return
            self._next = self._supervisor.incarnation.remote(incarnation.number)
            yield f"the engine was restarted ({incarnation.number} so far): {incarnation.cause}"

    def close(self) -> None:
        """Take back what was asked last: Ray complains of an answer that nobody reads."""
        ray.cancel(self._next)
        with suppress(RayError):
            ray.get(self._next, timeout=10.0)
