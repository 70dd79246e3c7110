"""The step line: at most one a period, about the steps since the last."""

from __future__ import annotations

import logging

import pytest

from kdray.driver.step_log import StepLog, line_of
from kdray.driver.step_loop import DriverStats

FIRST = DriverStats(steps=10, generated_tokens=20, accept_lengths={2: 5}, pages_total=64,
                    stage_seconds={"draft": 1.0, "wait": 0.0})  # fmt: skip
LATER = DriverStats(steps=20, generated_tokens=70, accept_lengths={2: 5, 5: 10}, running=3,
                    pages_used=7, pages_total=64,
                    stage_seconds={"draft": 1.02, "wait": 0.0})  # fmt: skip


def test_a_line_tells_of_the_steps_between() -> None:
    assert line_of(FIRST, LATER, 10.0) == (
        "step 20: 3 running, 0 waiting, 7/64 pages, 5 tokens/s, accept length 5.00, "
        "2.0 ms a step (draft 2.0)"
    )


def test_without_speculation_there_is_no_length() -> None:
    later = DriverStats(steps=11, generated_tokens=21)
    assert "accept length -" in line_of(DriverStats(steps=10), later, 1.0)


def test_at_most_a_line_a_period(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kdray.driver")
    now = 0.0
    log = StepLog(period_s=10.0, clock=lambda: now)
    for step in range(1, 101):
        now = step * 0.5
        log.stepped(DriverStats(steps=step))
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        f"step {n}" for n in (20, 40, 60, 80, 100)
    ]


def test_no_step_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kdray.driver")
    now = 0.0
    log = StepLog(period_s=10.0, clock=lambda: now)
    for seconds in (0.0, 20.0, 40.0):
        now = seconds
        log.stepped(FIRST)
    assert caplog.records == []
