"""draft_attention.cu's own source, thread by thread on the CPU, against float64.

Matrix products are emulated from the documented fragments; all else is the kernel's own text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.cuda import CudaOps
from kdray.kernels.cuda_draft import CudaDraftAttention, DraftPlan, most_pieces, plan_for
from tests.kernels.attention_cases import difference
from tests.kernels.draft_cases import DEMO, RULES, Case, Heads, expected, make_case
from tests.kernels.simt_loader import simt_loader

# Relative, of a row: weights in bf16, half a unit of 8 bits each, and one more rounding at the end.
BOUND = {torch.bfloat16: 2.0**-7, torch.float32: 2e-5}
DTYPES = (torch.bfloat16, torch.float32)
SMALL = Heads(slots=5, heads=2, groups=1, dim=64)


def attend(case: Case, *, pieces: int = 3, least: int = 1, seed: int = 0) -> Tensor:
    attention = CudaDraftAttention(simt_loader(seed), plan=DraftPlan(pieces, least))
    return attention.draft_attention(case.query, case.own, case.cache, case.batch, case.scale)


def check(
    ends: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    heads: Heads = SMALL,
    *,
    pieces: int = 3,
    least: int = 1,
    page_size: int = 16,
    rule: str = "all",
    size: float = 1.0,
) -> None:
    case = make_case(ends, heads, page_size=page_size, dtype=dtype, rule=rule, size=size)
    out = attend(case, pieces=pieces, least=least, seed=len(ends))
    assert out.shape == case.query.shape and out.is_contiguous()
    assert difference(out, expected(case)) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contexts_that_end_anywhere(dtype: torch.dtype) -> None:
    check([0, 1, 10, 15, 16, 17, 58, 59, 60, 63, 64, 65, 123, 200], dtype, pieces=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_beside_much(dtype: torch.dtype) -> None:
    check([0, 1, 10, 900], dtype, pieces=6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_of_sight(rule: str, dtype: torch.dtype) -> None:
    check([0, 2, 4, 61, 66, 69, 133, 200], dtype, rule=rule, pieces=9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads",
    [
        DEMO,
        Heads(slots=1, heads=1, groups=1, dim=64),
        Heads(slots=8, heads=8, groups=2, dim=128),
        Heads(slots=6, heads=6, groups=1, dim=128),
        Heads(slots=16, heads=4, groups=1, dim=64),
        Heads(slots=15, heads=14, groups=2, dim=64),
        Heads(slots=16, heads=8, groups=1, dim=128),
    ],
    ids=str,
)
def test_other_heads(heads: Heads, dtype: torch.dtype) -> None:
    check([70, 3, 140], dtype, heads)


@pytest.mark.parametrize("page_size", [1, 2, 16, 32, 64, 128])
def test_page_sizes(page_size: int) -> None:
    for dtype in DTYPES:
        check([150, 33], dtype, page_size=page_size)


@pytest.mark.parametrize("least", [1, 2, 5])
@pytest.mark.parametrize("pieces", [1, 2, 7, 40])
def test_any_cut(pieces: int, least: int) -> None:
    for dtype in DTYPES:
        check([5, 700, 130, 0], dtype, pieces=pieces, least=least)


def test_a_request_has_no_more_pieces_than_can_be_merged() -> None:
    for dtype in DTYPES:
        check([2300, 3], dtype, pieces=100)


def test_more_requests_than_a_warp_has_lanes() -> None:
    check([i * 7 % 130 for i in range(70)], torch.float32, pieces=90)


@pytest.mark.parametrize("size", [0.0, 6.0, 30.0])
def test_flat_and_peaky_scores(size: float) -> None:
    """Large scores make maxima grow along the keys, so that sums are rescaled."""
    for dtype in DTYPES:
        check([400, 70], dtype, size=size)


def test_the_order_of_threads_does_not_show() -> None:
    case = make_case([300, 7], SMALL)
    first = attend(case, seed=0)
    assert all(torch.equal(attend(case, seed=seed), first) for seed in range(1, 5))


def test_tickets_are_ready_for_the_next_launch() -> None:
    case = make_case([500, 90, 0], SMALL)
    attention = CudaDraftAttention(simt_loader(), plan=DraftPlan(5, 1))
    args = (case.query, case.own, case.cache, case.batch, case.scale)
    first, second = (attention.draft_attention(*args) for _ in range(2))
    assert torch.equal(first, second)


def test_queries_with_strides_of_their_own() -> None:
    case = make_case([30, 80], SMALL)
    wide = torch.full((2, 6, 5, 64), torch.nan, dtype=torch.bfloat16)
    wide[:, :5, 1:3] = case.query
    assert torch.equal(attend(replace(case, query=wide[:, :5, 1:3])), attend(case))
    turned = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend(replace(case, query=turned)), attend(case))


def test_a_length_beyond_the_page_table_reads_nothing_beyond_it() -> None:
    case = make_case([64], SMALL)
    table = case.batch.page_table[:, :4].contiguous()
    full = replace(case, batch=replace(case.batch, page_table=table))
    far = torch.tensor([1000], dtype=torch.int32)
    beyond = replace(full, batch=replace(full.batch, end=far))
    assert torch.equal(attend(beyond), attend(full))


@pytest.mark.parametrize("dim", [16, 64])
def test_cuda_ops_leave_to_the_reference_what_the_kernel_does_not_take(dim: int) -> None:
    heads = Heads(slots=3, heads=4, groups=2, dim=dim)
    case = make_case([20, 0], heads, dtype=torch.float32)
    args = (case.query, case.own, case.cache, case.batch, case.scale)
    found = CudaOps(torch.device("cpu"), simt_loader()).draft_attention(*args)
    assert difference(found, expected(case)) < BOUND[torch.float32]
    attention = CudaDraftAttention(simt_loader())
    if dim == 16:
        with pytest.raises(KernelError, match=r"D of \(64, 128\)"):
            attention.draft_attention(*args)


def test_no_requests() -> None:
    assert attend(make_case([], SMALL)).shape == (0, 5, 2, 64)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("requests", [1, 3, 64])
def test_a_plan_fits_the_workspace_and_fills_the_device(requests: int, groups: int) -> None:
    plan = plan_for(132, requests, groups)
    assert 132 <= groups * plan.pieces <= groups * most_pieces(132, groups)
