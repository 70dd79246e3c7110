"""No test's random numbers hang on which tests its worker ran before."""

from __future__ import annotations

import pytest
import torch

DRAWN: list[float] = []


@pytest.mark.parametrize("turn", range(2))
def test_every_test_draws_the_same_numbers(turn: int) -> None:
    DRAWN.append(float(torch.rand(())))
    assert set(DRAWN) == {DRAWN[0]} and torch.initial_seed() == 0
