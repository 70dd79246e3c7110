"""Whose turn it is: steps from the host hold up everybody who decodes ahead of it.

Such a step is launched by the host: all of it, or what a graph of its forward pass leaves. It takes
as long as several device rounds, and the next round waits behind it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HostTurns:
    """Of requests whose draws need the host: after a step of theirs as much time passes as it took.

    So either kind has half of the time, and neither waits long. now: seconds, from any start.
    """

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


class PromptTurns:
    """Of requests that wait for their first step while others decode.

    Most of a short prompt's step is a price that any number of prompts can share. So behind a step
    of prompts the next ones gather, until their waiting has cost as much as that price costs those
    who decode: W requests by the time waited against D by the price, and for the price itself at
    most. That doubles what a request waits at worst; where steps of prompts are rarer than that,
    nobody waits. The price is the shortest such step so far: a longer one had rows to pay for.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = -math.inf
        self._price = math.inf

    def is_due(self, *, waiting: int, decoding: int) -> bool:
        """waiting: those of the queue that have a slot."""
        if self._last == -math.inf or waiting == 0 or decoding == 0:
            return True
        return self._now() - self._last >= self._price * min(1.0, decoding / waiting)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around a step that runs prompts."""
        start = self._now()
        yield
        self._last = self._now()
        self._price = min(self._price, self._last - start)
