"""Signs of life of a rank, left in memory that others map: no call, no message."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_LAYOUT = struct.Struct("<q")  # time.monotonic_ns of the last beat; all of a host share that clock


class Heartbeat:
    """A rank's end: beat() costs less than a microsecond."""

    def __init__(self, path: str) -> None:
        Path(path).write_bytes(bytes(_LAYOUT.size))
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.beat()

    def beat(self) -> None:
        _LAYOUT.pack_into(self._memory, 0, time.monotonic_ns())


def heartbeat_age(path: str) -> float | None:
    """Seconds since the last beat; None where the rank has not begun, or its folder is gone."""
    try:
        [beat] = _LAYOUT.unpack(Path(path).read_bytes())
    except (OSError, struct.error):
        return None
    return (time.monotonic_ns() - beat) / 1e9 if beat else None
