"""Whose turn it is where some requests' draws need the host and others run ahead of it.

A step from the host takes several times as long as a device round, and the others' next round waits
behind it. So after a step from the host its requests let as much time pass as it took: either kind
has half of the time, and neither waits long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HostTurns:
    """now: seconds, from any start."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._due = now()

    def is_due(self) -> bool:
        return self._now() >= self._due

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around a step from the host."""
        start = self._now()
        yield
        end = self._now()
        self._due = end + (end - start)
