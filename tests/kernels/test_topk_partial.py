"""The best of a vocabulary's shards, merged, are the best of the whole: reference and op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdray.core.tree import ABSENT
from kdray.kernels.ops import NO_ID, Ops, PartialTopk


def merged(ops: Ops, logits: Tensor, shards: int, k: int) -> tuple[Tensor, Tensor]:
    pieces = logits.chunk(shards, dim=1)
    width = pieces[0].shape[1]
    found = [ops.topk_partial(piece, k, i * width) for i, piece in enumerate(pieces)]
    return ops.merge_topk(
        PartialTopk(
            value=torch.stack([part.value for part in found]),
            id=torch.stack([part.id for part in found]),
            mass=torch.stack([part.mass for part in found]),
        )
    )


@pytest.mark.parametrize(("shards", "k"), [(1, 4), (2, 8), (8, 5), (8, 16)])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_the_best_of_the_shards_are_the_best_of_all(
    ops: Ops, shards: int, k: int, spread: float
) -> None:
    logits = spread * torch.randn(7, 96, generator=torch.Generator().manual_seed(shards))
    token, score = merged(ops, logits, shards, k)
    wanted = ops.topk_logprob(logits, k)
    assert torch.equal(token, wanted[0])
    assert (score - wanted[1]).abs().max() <= 8 + spread  # log-sum-exps by float32 rounding


def test_a_shard_says_what_it_has(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    part = ops.topk_partial(logits, 5, 100)
    assert part.id.tolist() == [[101, 102, 100, NO_ID, NO_ID]]
    assert part.value.tolist() == [[3.0, 2.0, 1.0, -torch.inf, -torch.inf]]
    assert part.mass.shape == (1, 3) and part.mass.dtype == torch.int64


def test_ties_go_to_the_smaller_token_and_absent_ones_come_last(ops: Ops) -> None:
    logits = torch.full((2, 16), -torch.inf)
    logits[0, [3, 6, 9, 14]] = 1.0
    logits[1, 13] = -2.0
    token, score = merged(ops, logits, 4, 3)
    assert token[0].tolist() == [3, 6, 9]
    assert (score[0] == score[0, 0]).all()
    assert token[1, 0] == 13 and score[1, 0] == 0
    assert (score[1, 1:] == ABSENT).all()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_logits_without_a_number_spoil_no_others(ops: Ops, shards: int) -> None:
    """NaN as -inf and +inf as the largest number, in any shard, as without shards."""
    logits = torch.randn(7, 96, generator=torch.Generator().manual_seed(2))
    logits[0] = torch.nan
    logits[1, 5] = torch.nan
    logits[2, 70] = torch.inf
    logits[3, :48] = -torch.inf
    logits[4] = -torch.inf
    logits[5, :50] = torch.nan
    logits[6] = torch.inf
    token, score = merged(ops, logits, shards, 4)
    wanted, best = ops.topk_logprob(logits, 4)
    assert torch.equal(score == ABSENT, best == ABSENT)
    assert ((score - best).abs()[best != ABSENT] <= 8).all()
    assert torch.equal(token[score != ABSENT], wanted[best != ABSENT])
