"""Event counters grow, by known names only."""

from __future__ import annotations

import pytest

from kdray.core.events import EVENTS, EventCounters


def test_all_names_are_there_from_the_start() -> None:
    assert EventCounters().totals() == dict.fromkeys(EVENTS, 0)


def test_totals_add_up() -> None:
    events = EventCounters()
    events.add("restarts_total")
    events.add("replayed_requests_total", 5)
    events.add("replayed_requests_total", 2)
    totals = events.totals()
    assert (totals["restarts_total"], totals["replayed_requests_total"]) == (1, 7)


def test_unknown_names_and_steps_back_are_refused() -> None:
    events = EventCounters()
    with pytest.raises(KeyError):
        events.add("restart_total")
    with pytest.raises(ValueError, match="only grows"):
        events.add("restarts_total", -1)
    assert events.totals() == dict.fromkeys(EVENTS, 0)
