"""Rare events that operators watch, counted where they happen and shown on the metrics page.

Whoever handles a fault holds an EventCounters and raises it; whoever shows metrics reads totals().
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

# Name -> what it says to an operator. A counter's metric is kdray_<name>.
EVENTS: Mapping[str, str] = {
    "restarts_total": "Restarts of the gang of ranks.",
    "replayed_requests_total": "Requests continued after a restart.",
    "replayed_tokens_total": "Tokens of them that were out already and ran as a prompt again.",
    "watchdog_expirations_total": "Steps given up because they took too long.",
    "broken_requests_total": "Requests ended because no finite logit was left to draw from.",
}


class EventCounters:
    """Totals since the start, by the names of EVENTS. Any thread may raise and read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(EVENTS, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Raise a counter; KeyError where EVENTS has no such name, so that none goes unseen."""
        if amount < 0:
            raise ValueError(f"{name}: a counter only grows, got {amount}")
        with self._lock:
            self._totals[name] += amount

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)
