"""How far the loading of weights is: a line on a terminal, else a line in the log now and then."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

WIDTH = 30
REDRAW_S = 0.2  # on a terminal
LOG_EVERY_S = 10.0
_log = logging.getLogger(__name__)


class LoadProgress:
    """Counts bytes, from any thread. As a context: the last line says what it came to."""

    def __init__(
        self,
        total: int,
        what: str,
        *,
        screen: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """total: bytes to come; screen: a terminal to draw on, None: stderr if it is one."""
        self._total = total
        self._what = what
        self._clock = clock
        self._screen = screen or (sys.stderr if sys.stderr.isatty() else None)
        self._done = 0
        self._start = self._shown = clock()
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """So many bytes more were read."""
        with self._lock:
            self._done += num_bytes
            now, every = self._clock(), REDRAW_S if self._screen else LOG_EVERY_S
            if now - self._shown >= every:
                self._shown = now
                self._show(self.line(now))

    def line(self, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        speed = self._done / seconds
        share = min(1.0, self._done / self._total) if self._total else 1.0
        left = (self._total - self._done) / speed if speed else 0.0
        bar = "#" * int(WIDTH * share)
        return (
            f"{self._what} [{bar:<{WIDTH}}] {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB, "
            f"{speed / 1e9:.2f} GB/s, {_clock_time(left)} left"
        )

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        seconds = max(self._clock() - self._start, 1e-9)
        if self._screen:
            print(f"\r\033[K{self.line(self._clock())}", file=self._screen, flush=True)
        if kind is None:
            _log.info(
                "%s: %.2f GB in %.1f s, %.2f GB/s",
                self._what,
                self._done / 1e9,
                seconds,
                self._done / seconds / 1e9,
            )

    def _show(self, line: str) -> None:
        if self._screen:
            print(f"\r\033[K{line}", end="", file=self._screen, flush=True)
        else:
            _log.info("%s", line)


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02}"
