"""How far two tokens are from being exchanged, filters included."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from judge import Judge, margin_of, needs_of, slack
from traffic import demo_prompts, draw_visits

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.core.sampling import draw, temper
from kdray.engine import resolve

LOGITS = np.array([3.0, 2.9, 1.0, 0.5, -4.0], dtype=np.float32)


def test_of_greedy_tokens_it_is_the_distance_of_their_logits() -> None:
    greedy = SamplingParams(temperature=0.0)
    assert margin_of(LOGITS, greedy, 5, (0, 1)) == pytest.approx(0.1, abs=1e-6)
    assert margin_of(LOGITS, greedy, 5, (2, 0)) == pytest.approx(2.0)


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.7), SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.3, top_k=4, top_p=0.8), SamplingParams(temperature=1.0, min_p=0.3),
], ids=str)  # fmt: skip
def test_logits_moved_by_it_give_the_other_token(params: SamplingParams) -> None:
    """Whatever a small move turns one draw into, the margin is not above the move."""
    dice = np.random.default_rng(1)
    parted = 0
    for seed in range(1500):
        own = SamplingParams(**{**_fields(params), "seed": seed})
        logits = dice.normal(0, 1.5, 8).astype(np.float32)
        moved = logits + dice.uniform(-0.05, 0.05, 8).astype(np.float32)
        one, other = draw(logits, own, seed, 9), draw(moved, own, seed, 9)
        if one != other:
            parted += 1
            assert margin_of(logits, own, 9, (one, other)) <= 0.1 * 1.0001
    assert parted > 5


def test_a_token_that_only_a_wrong_draw_gives_is_far() -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    token = draw(LOGITS, params, 3, 5)
    assert margin_of(LOGITS, params, 5, (token, 4)) > 1
    cut = SamplingParams(temperature=1.0, top_k=2, seed=3)
    assert margin_of(LOGITS, cut, 5, (draw(LOGITS, cut, 3, 5), 3)) >= 2.4


def test_what_each_of_two_tokens_needs() -> None:
    greedy = SamplingParams(temperature=0.0)
    assert needs_of(LOGITS, greedy, 5, (2, 0)) == pytest.approx((2.0, 0.0))
    for seed in range(20):
        drawn = SamplingParams(temperature=1.0, top_k=3, seed=seed)
        token = draw(LOGITS, drawn, seed, 5)
        for other in {0, 1, 2, 3} - {token}:
            need = needs_of(LOGITS, drawn, 5, (token, other))
            assert need[0] == 0 < need[1] == margin_of(LOGITS, drawn, 5, (token, other))
            assert needs_of(LOGITS, drawn, 5, (other, token)) == need[::-1]


def test_slack_is_counted_from_the_edge() -> None:
    tempered = temper(LOGITS, 1.0)
    assert slack(tempered, SamplingParams(), 4) == float("inf")
    two = SamplingParams(top_k=2)
    assert slack(tempered, two, 1) == pytest.approx(1.9)
    assert slack(tempered, two, 2) == pytest.approx(-1.9)
    least = SamplingParams(min_p=float(np.exp(-2.0)))
    assert slack(tempered, least, 2) == pytest.approx(0.0, abs=1e-6)
    assert slack(tempered, least, 3) == pytest.approx(-0.5, abs=1e-6)
    half = SamplingParams(top_p=0.5)
    assert slack(tempered, half, 0) > 0 > slack(tempered, half, 2)


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def test_a_dtype_moves_logits_by_what_its_rounding_is() -> None:
    config = EngineConfig(device="cpu", dtype="bfloat16", drafter="none")
    prompts = demo_prompts(resolve(config), each=1)
    visits = [(visit, [65, 66, 67]) for visit in islice(draw_visits(prompts, seed=1), 3)]
    judge = Judge(config)
    moved = judge.movement(visits)
    assert len(moved) == 9 and moved.max() > 2.0**-8
    exact = Judge(EngineConfig(device="cpu", dtype="float32", drafter="none"))
    assert exact.movement(visits).max() == 0 and exact.near_tie < judge.near_tie
