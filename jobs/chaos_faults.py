"""The faults of a chaos run: signals to the processes of a gang that is up."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from chaos_load import Load
from record import Record

from kdray.core.events import EventCounters

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    """What to do to which rank: SIGKILL ends it, SIGSTOP makes it hang."""

    kind: str
    rank: int

    @property
    def signal(self) -> signal.Signals:
        return signal.SIGSTOP if self.kind == "hang" else signal.SIGKILL


def planned_faults() -> Iterator[Fault]:
    """Kills of rank 1, but the third of rank 0; a hang of each behind the first and the fourth."""
    for number in count():
        yield Fault("driver killed", 0) if number == 2 else Fault("rank killed", 1)
        if number in (0, 3):
            yield Fault("hang", 1 if number == 0 else 0)


@dataclass(slots=True)
class Trouble:
    """Strikes an engine again and again, and records how it comes back.

    supervisor   the engine's supervisor actor
    events       of the client whose readers get `load`
    faults       what was done so far
    """

    supervisor: Any
    events: EventCounters
    load: Load
    record: Record
    faults: list[Fault] = field(default_factory=list)

    async def strike(self, every_s: float) -> None:
        """Kills at multiples of the period and hangs halfway between, each in a gang that is up; a
        time that passes while there is none is left out. Until cancelled."""
        start = time.monotonic()
        for fault in planned_faults():
            shift = every_s / 2 if fault.kind == "hang" else 0.0
            await asyncio.sleep(every_s - (time.monotonic() - start - shift) % every_s)
            await self._one(fault, start)

    async def _one(self, fault: Fault, start: float) -> None:
        before = self._restarts()
        while not (pids := await self.supervisor.pids.remote()):
            await asyncio.sleep(_POLL_S)
        struck = time.monotonic()
        with suppress(ProcessLookupError):  # it fell by itself: that counts as well
            os.kill(pids[fault.rank], fault.signal)
        self.faults.append(fault)
        while self._restarts() == before:
            await asyncio.sleep(_POLL_S)
        up = time.monotonic()
        while self.load.shown < up:
            await asyncio.sleep(_POLL_S)
        self.record.add(
            {"fault": fault.kind, "rank": fault.rank},
            {},
            {
                "at_s": struck - start,
                "up_again_s": up - struck,
                "first_text_s": self.load.shown - struck,
                "done": float(len(self.load.replies)),
            },
        )

    def _restarts(self) -> int:
        return self.events.totals()["restarts_total"]
