"""How long a step may take: learnt from slow steps, never below the floors; a clock of our own."""

from __future__ import annotations

import pytest

from kdray.config import FaultPolicy
from kdray.driver.watch import StepWatch

POLICY = FaultPolicy(step_multiple=20.0, step_floor_s=10.0, start_steps=3, start_floor_s=100.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def step(watch: StepWatch, clock: Clock, seconds: float) -> float:
    """One step of so many seconds; the deadline it had."""
    with watch.step():
        deadline = watch.pulse().deadline_s
        clock.now += seconds
    return deadline


def test_between_steps_nothing_is_late() -> None:
    clock = Clock()
    watch = StepWatch(POLICY, clock)
    clock.now += 1e6
    pulse = watch.pulse()
    assert (pulse.steps, pulse.in_step_s, pulse.is_late) == (0, None, False)


def test_the_first_steps_have_time_to_start_and_later_ones_the_floor() -> None:
    clock = Clock()
    watch = StepWatch(POLICY, clock)
    assert [step(watch, clock, 0.01) for _ in range(5)] == [100.0, 100.0, 100.0, 10.0, 10.0]


def test_a_step_is_late_beyond_a_multiple_of_the_slow_ones() -> None:
    clock = Clock()
    watch = StepWatch(POLICY, clock)
    for _ in range(64):
        step(watch, clock, 2.0)
    with watch.step():
        clock.now += 39.0
        assert not watch.pulse().is_late
        clock.now += 2.0
        pulse = watch.pulse()
        assert pulse.is_late and (pulse.in_step_s, pulse.deadline_s) == (41.0, 40.0)
    assert not watch.pulse().is_late


def test_one_hiccup_does_not_move_the_deadline_and_a_new_pace_does() -> None:
    clock = Clock()
    watch = StepWatch(POLICY, clock)
    for _ in range(200):
        step(watch, clock, 1.0)
    step(watch, clock, 300.0)
    for _ in range(16):
        step(watch, clock, 1.0)
    assert step(watch, clock, 1.0) == 20.0
    for _ in range(256):
        step(watch, clock, 3.0)
    assert step(watch, clock, 3.0) == 60.0


def test_a_step_that_raises_has_ended() -> None:
    clock = Clock()
    watch = StepWatch(POLICY, clock)
    with pytest.raises(RuntimeError), watch.step():
        raise RuntimeError("out of memory")
    assert watch.pulse().in_step_s is None and watch.pulse().steps == 1
