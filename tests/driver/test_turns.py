"""Steps from the host leave the others as much time as they took; prompts gather for one."""

from __future__ import annotations

from kdray.driver.turns import HostTurns, PromptTurns


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


def test_prompts_gather_behind_a_step_of_planned_for_its_price_at_most() -> None:
    clock = [100.0]
    turns = PromptTurns(lambda: clock[0])
    assert turns.is_due(waiting=1, decoding=15)
    with turns.turn():
        clock[0] += 8.0
    for now, is_due in ((108.0, False), (115.9, False), (116.0, True), (500.0, True)):
        clock[0] = now
        assert turns.is_due(waiting=1, decoding=15) == is_due


def test_the_more_wait_and_the_fewer_decode_the_sooner_prompts_run() -> None:
    clock = [0.0]
    turns = PromptTurns(lambda: clock[0])
    with turns.turn():
        clock[0] = 8.0
    for waiting, decoding, due in ((5, 5, 16.0), (4, 2, 12.0), (8, 1, 9.0)):
        for now in (due - 0.5, due):
            clock[0] = now
            assert turns.is_due(waiting=waiting, decoding=decoding) == (now == due)
    clock[0] = 8.0
    assert turns.is_due(waiting=3, decoding=0)


def test_a_step_that_had_rows_to_pay_for_does_not_raise_the_price() -> None:
    clock = [0.0]
    turns = PromptTurns(lambda: clock[0])
    for took in (50.0, 2.0, 30.0):
        with turns.turn():
            clock[0] += took
    clock[0] += 2.0
    assert turns.is_due(waiting=1, decoding=1)
