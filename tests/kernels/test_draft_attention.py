"""The reference's draft attention against float64, over awkward lengths, heads and rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdray.kernels.ops import Ops
from kdray.kernels.reference_draft import BlockView
from tests.kernels.attention_cases import difference
from tests.kernels.draft_cases import DEMO, RULES, Heads, expected, make_case

HEADS = [DEMO, Heads(slots=5, heads=3, groups=3, dim=6), Heads(slots=1, heads=7, groups=1, dim=16)]


@pytest.mark.parametrize("page_size", [1, 6, 16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_softmax_over_what_is_seen(
    ops: Ops, heads: Heads, rule: str, page_size: int
) -> None:
    for ends in ([0], [7, 7], [0, 1, 10, 90], [33, 2, 71]):
        case = make_case(ends, heads, page_size=page_size, dtype=torch.float32, rule=rule)
        out = ops.draft_attention(case.query, case.own, case.cache, case.batch, case.scale)
        assert difference(out, expected(case)) < 2e-5


def test_bfloat16_keeps_its_dtype(ops: Ops) -> None:
    case = make_case([0, 40], DEMO)
    out = ops.draft_attention(case.query, case.own, case.cache, case.batch, case.scale)
    assert out.dtype == torch.bfloat16
    assert difference(out, expected(case)) < 2.0**-6


def test_one_batch_serves_many_layers(ops: Ops) -> None:
    first = make_case([9, 30], DEMO, dtype=torch.float32, seed=0)
    second = replace(make_case([9, 30], DEMO, dtype=torch.float32, seed=1), batch=first.batch)
    second.cache.nan_to_num_(0.5)  # its own pages lay elsewhere
    for case in (first, second, first):
        out = ops.draft_attention(case.query, case.own, case.cache, case.batch, case.scale)
        assert difference(out, expected(case)) < 2e-5


@pytest.mark.parametrize(
    ("ends", "rule", "wide", "masked"),
    [([9, 9], "all", 9, False), ([9, 9], "causal", 9, True), ([9, 4], "window", 9, True),
     ([300, 9], "short window", 2, True)],
)  # fmt: skip
def test_the_host_looks_at_no_more_than_it_must(
    ends: list[int], rule: str, wide: int, masked: bool
) -> None:
    view = BlockView.of(make_case(ends, DEMO, rule=rule).batch, DEMO.slots)
    assert view.slots.shape == (2, wide + DEMO.slots)
    assert (view.visible is not None) == masked
    assert (view.padding is not None) == (len(set(ends)) > 1 and rule != "short window")
