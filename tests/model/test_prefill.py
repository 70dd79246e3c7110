"""States over blocks of keys: a needle in any place is found, however the keys are cut."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kdray.model.prefill import AttentionState, attend_block, merge_states

HEADS, WIDTH, VALUE, SCALE = 2, 12, 5, 0.7


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    score = query.double() @ key.double().transpose(1, 2) * SCALE
    if causal:
        score = score.masked_fill(~torch.ones(score.shape[1:]).tril().bool(), -torch.inf)
    return score.softmax(-1) @ value.double(), score.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 31, 32, 33])
def test_a_block_equals_a_softmax(rows: int, causal: bool) -> None:
    query, key = draw(HEADS, rows, WIDTH), draw(HEADS, rows, WIDTH, seed=1)
    value = draw(HEADS, rows, VALUE, seed=2)
    state = attend_block(query, key, value, SCALE, causal=causal)
    mixed, lse = exact(query, key, value, causal=causal)
    torch.testing.assert_close(state.mixed.double(), mixed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.lse.double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", [[0, 64], [0, 1, 64], [0, 16, 32, 48, 64], [0, 63, 64]], ids=str)
def test_a_needle_is_found_on_every_side_of_every_cut(cuts: list[int]) -> None:
    """One key far above the others, at each place in turn: its value comes out whole."""
    query, key, value = (
        draw(HEADS, 3, WIDTH),
        draw(HEADS, 64, WIDTH, seed=1),
        draw(HEADS, 64, VALUE),
    )
    for place in range(64):
        hay = 0.1 * key
        hay[:, place] = 40 * query[:, 1] / query[:, 1].square().sum(-1, keepdim=True)
        states = [
            attend_block(query, hay[:, a:b], value[:, a:b], 1.0, causal=False)
            for a, b in pairwise(cuts)
        ]
        whole: AttentionState = reduce(merge_states, states)
        torch.testing.assert_close(whole.mixed[:, 1], value[:, place], rtol=1e-4, atol=1e-4)


def test_states_merge_however_far_apart_their_scores_are() -> None:
    near = AttentionState(torch.ones(1, 1, 2), torch.full((1, 1, 1), 90.0))
    far = AttentionState(torch.full((1, 1, 2), 7.0), torch.full((1, 1, 1), -200.0))
    for merged in (merge_states(near, far), merge_states(far, near)):
        assert torch.equal(merged.mixed, near.mixed) and torch.equal(merged.lse, near.lse)
