from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdray.core.request import SamplingParams
from kdray.core.sampling import draw
from kdray.kernels.ops import Ops, SamplingRows

WAYS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.6, min_p=0.05),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.9, presence_penalty=1.0, frequency_penalty=0.5, top_k=9),
    SamplingParams(temperature=0.0, logit_bias=((3, 50.0),)),
    SamplingParams(temperature=1.0, min_tokens=4),
]


def rows_of(ways: list[SamplingParams]) -> SamplingRows:
    history = ([1, 2, 3], [0, 2, 2])
    return SamplingRows(
        params=ways,
        seed=[2**40 + row % 3 for row in range(len(ways))],
        position=[5 + 7 * row for row in range(len(ways))],
        history=[history if params.uses_history else None for params in ways],
        end_token_ids=[frozenset({0, 1})] * len(ways),
    )


@pytest.mark.parametrize("vocab", [1, 7, 50])
def test_a_batch_draws_what_each_row_draws_alone(ops: Ops, vocab: int) -> None:
    ways = [way for way in WAYS if vocab > 2 or way.min_tokens == 0] * 5
    rows = rows_of(ways)
    logits = torch.randn(len(ways), vocab) * 2
    logits[1::4, 0] = float("nan") if vocab > 1 else 0.0
    expected = [
        draw(
            logits[m].numpy(),
            rows.params[m],
            rows.seed[m],
            rows.position[m],
            rows.history[m],
            rows.end_token_ids[m],
        )
        for m in range(len(ways))
    ]
    token = ops.sample_tokens(logits, rows)
    assert token.dtype == torch.int32 and token.tolist() == expected


def test_a_row_does_not_depend_on_its_batch(ops: Ops) -> None:
    rows, logits = rows_of(WAYS), torch.randn(len(WAYS), 40)
    together = ops.sample_tokens(logits, rows).tolist()
    for m in range(len(WAYS)):
        fields = ("params", "seed", "position", "history", "end_token_ids")
        alone = replace(rows, **{name: [getattr(rows, name)[m]] for name in fields})
        assert ops.sample_tokens(logits[m : m + 1], alone).tolist() == [together[m]]


def test_greedy_rows_take_the_lowest_of_equal_tokens(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0], [float("nan"), 0.0, 0.0]])
    assert ops.sample_tokens(logits, rows_of([SamplingParams()] * 2)).tolist() == [1, 1]


@pytest.mark.parametrize("way", WAYS, ids=range(len(WAYS)))
def test_a_dead_row_is_named(ops: Ops, way: SamplingParams) -> None:
    logits = torch.zeros(3, 8)
    logits[2] = float("nan")
    with pytest.raises(ValueError, match="row 2"):
        ops.sample_tokens(logits, rows_of([way] * 3))


def test_noise_made_in_pieces_is_the_same(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, logits = rows_of(WAYS * 3), torch.randn(3 * len(WAYS), 40)
    whole = ops.sample_tokens(logits, rows)
    monkeypatch.setattr("kdray.kernels.reference_sampling.NOISE_AT_ONCE", 100)
    assert torch.equal(ops.sample_tokens(logits, rows), whole)


def test_no_rows_draw_no_tokens(ops: Ops) -> None:
    assert ops.sample_tokens(torch.zeros(0, 5), rows_of([])).tolist() == []
