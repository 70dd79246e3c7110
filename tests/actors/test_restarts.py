"""The budget of restarts: so many in a window, each waited for longer than the one before."""

from __future__ import annotations

from kdray.actors.restarts import RestartBudget
from kdray.config import FaultPolicy

POLICY = FaultPolicy(max_restarts=4, window_s=100.0, backoff_s=2.0)


def test_waits_double_until_the_budget_is_spent() -> None:
    budget = RestartBudget(POLICY, clock=lambda: 7.0)
    assert [budget.take() for _ in range(6)] == [0.0, 2.0, 4.0, 8.0, None, None]


def test_restarts_long_ago_do_not_count() -> None:
    times = [0.0, 10.0, 20.0, 30.0, 90.0, 101.0, 102.0, 111.0, 500.0]
    coming = iter(times)
    budget = RestartBudget(POLICY, clock=lambda: next(coming))
    taken = [budget.take() for _ in times]
    # At 101 the one at 0 is over, at 111 the one at 10; at 500 all of them.
    assert taken == [0.0, 2.0, 4.0, 8.0, None, 8.0, None, 8.0, 0.0]


def test_no_restarts_at_all() -> None:
    assert RestartBudget(FaultPolicy(max_restarts=0)).take() is None
