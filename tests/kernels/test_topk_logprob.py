from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kdray.core.tree import ABSENT, quantise
from kdray.kernels.ops import Ops, load_ops

LOGITS = st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, float("nan"), float("-inf")])


def topk_by_loop(row: list[float], k: int) -> list[int]:
    """Token ids by value descending, then id; absent ones behind."""
    values = [-np.inf if np.isnan(value) else value for value in row]
    return sorted(range(len(row)), key=lambda token: (-values[token], token))[:k]


@given(
    st.lists(st.lists(LOGITS, min_size=6, max_size=6), min_size=1, max_size=4), st.integers(1, 6)
)
def test_the_best_tokens_with_ties_by_id(rows: list[list[float]], k: int) -> None:
    token, score = load_ops("cpu").topk_logprob(torch.tensor(rows), k)
    assert token.dtype == score.dtype == torch.int32
    assert token.tolist() == [topk_by_loop(row, k) for row in rows]
    for row, tokens, scores in zip(rows, token.tolist(), score.tolist(), strict=True):
        total = np.logaddexp.reduce([v for v in row if np.isfinite(v)] or [-np.inf])
        for one, fixed in zip(tokens, scores, strict=True):
            if np.isfinite(row[one]):
                assert fixed == pytest.approx(quantise(row[one] - total).item(), abs=4)
            else:
                assert fixed == ABSENT
        assert scores == sorted(scores, reverse=True)


def test_score_is_the_fixed_point_of_the_full_vocabulary_logprob(ops: Ops) -> None:
    logits = torch.randn(3, 2, 500) * 4
    token, score = ops.topk_logprob(logits, 8)
    best = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    assert token.tolist() == best.indices[..., :8].tolist()
    expected = torch.from_numpy(quantise(best.values[..., :8].numpy()))
    # float32 log-softmax rounds at about 1e-6 nat, a few steps of 2^-22.
    assert (score - expected).abs().max() <= 16


def test_quantisation_is_that_of_core(ops: Ops) -> None:
    # One token that dwarfs the rest: its log-prob is 0 and the others' are their logits.
    logprob = -torch.rand(200) * 40 - 17
    _, score = ops.topk_logprob(torch.cat([torch.zeros(1), logprob])[None], 201)
    expected = np.sort(quantise(logprob.numpy()))[::-1]
    assert score[0].tolist() == [0, *expected.tolist()]


def test_bfloat16_ties_go_to_the_lowest_id_in_a_large_vocabulary(ops: Ops) -> None:
    logits = torch.randn(2, 163840).bfloat16()
    token, _ = ops.topk_logprob(logits, 64)
    expected = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :64]
    assert torch.equal(token.long(), expected)


def test_a_small_vocabulary_is_padded_with_absent_candidates(ops: Ops) -> None:
    token, score = ops.topk_logprob(torch.tensor([[1.0, 1.0]]), 4)
    half = quantise(np.log(0.5)).item()
    assert token.tolist() == [[0, 1, 0, 0]]
    assert score.tolist() == [[pytest.approx(half, abs=1)] * 2 + [ABSENT] * 2]


def test_a_dead_row_is_absent_throughout(ops: Ops) -> None:
    logits = torch.tensor([[float("nan")] * 3, [float("-inf")] * 3])
    token, score = ops.topk_logprob(logits, 2)
    assert token.tolist() == [[0, 1]] * 2 and score.tolist() == [[ABSENT] * 2] * 2


def test_infinity_takes_the_whole_mass(ops: Ops) -> None:
    token, score = ops.topk_logprob(torch.tensor([[0.0, float("inf")]]), 2)
    assert token.tolist() == [[1, 0]] and score.tolist() == [[0, quantise(-1e9).item()]]


def test_shapes_without_rows_or_candidates(ops: Ops) -> None:
    for shape, k in [((0, 7, 5), 3), ((2, 7, 5), 0)]:
        token, score = ops.topk_logprob(torch.zeros(shape), k)
        assert token.shape == score.shape == (*shape[:-1], k)
