"""Steps from the host leave the others as much time as they took."""

from __future__ import annotations

from kdray.driver.turns import HostTurns


def test_a_turn_is_followed_by_as_much_time_for_the_others() -> None:
    clock = [100.0]
    turns = HostTurns(lambda: clock[0])
    assert turns.is_due()
    with turns.turn():
        clock[0] += 3.0
    for now, is_due in ((103.0, False), (105.9, False), (106.0, True)):
        clock[0] = now
        assert turns.is_due() == is_due
    with turns.turn():
        clock[0] += 1.0
    assert not turns.is_due()
