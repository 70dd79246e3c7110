"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>GB|GiB|MiB)", re.IGNORECASE)
_UNIT_BYTES = {"gb": 10**9, "gib": 1 << 30, "mib": 1 << 20}


def bytes_of(text: str) -> int | None:
    """ "96 GiB", "80GB", "512 MiB" -> bytes; None: it is no such size."""
    match = _SIZE.fullmatch(text.strip())
    return round(float(match["number"]) * _UNIT_BYTES[match["unit"].lower()]) if match else None
