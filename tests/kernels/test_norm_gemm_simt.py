"""skinny_gemm_normed.cu: its own source, run on the CPU."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels import cuda_norm_gemm
from kdray.kernels.cuda import CudaOps
from kdray.kernels.gemm_plan import GemmPlan, GemmShape
from kdray.kernels.gemm_table import plan_for
from tests.kernels import norm_gemm_cases as cases
from tests.kernels.fused_cases import some_norm
from tests.kernels.gemm_cases import drawn, matrix
from tests.kernels.simt_loader import simt_loader

CPU = torch.device("cpu")
# (row tiles, warps over outputs, over runs, split, slots), width of a row
CUTS = [
    (GemmPlan(1, 1, 16, 1, 4), 1536),  # Kimi K2.6's
    (GemmPlan(2, 1, 8, 1, 4), 1536),  # a warp has its part of all eight rows
    (GemmPlan(1, 2, 4, 1, 4), 288),  # runs of 2 and 3 steps; a second part of 4 vectors
    (GemmPlan(2, 2, 2, 1, 3), 608),
    (GemmPlan(1, 1, 4, 1, 4), 96),  # a run of nothing
    (GemmPlan(1, 2, 4, 1, 4), 160),  # a warp a row
    (GemmPlan(1, 2, 1, 1, 8), 32),
    (GemmPlan(1, 1, 1, 1, 8), 128),  # one warp has all rows
    (GemmPlan(1, 1, 16, 1, 3), 2304),  # nine warps of sixteen
]


def ops_of(seed: int, plan: GemmPlan | None = None) -> CudaOps:
    ops = CudaOps(CPU, simt_loader(seed))
    ops._gemm.plan = plan
    return ops


@pytest.mark.parametrize(("plan", "width"), CUTS, ids=str)
def test_it_is_its_two_launches(plan: GemmPlan, width: int) -> None:
    for tokens in (1, 3, 8):
        cases.check_normed(ops_of(tokens, plan), tokens, width, 40)


@pytest.mark.parametrize("tokens", [2, 4, 5, 6, 7])
def test_every_number_of_rows(tokens: int) -> None:
    plan, width = CUTS[0]
    cases.check_normed(ops_of(9, plan), tokens, width, 24, gap=576)


@pytest.mark.parametrize(("plan", "width"), [CUTS[0], CUTS[1], CUTS[-1]], ids=str)
def test_squares_are_added_up_in_the_norms_order(plan: GemmPlan, width: int) -> None:
    cases.check_order(ops_of(5, plan), width)


def test_the_plan_of_the_table() -> None:
    cases.check_normed(ops_of(2), 2, 1536, 1536)


def test_a_row_does_not_depend_on_its_batch() -> None:
    cases.check_alone(ops_of(3, CUTS[2][0]), 9, 288, 24)


@pytest.mark.parametrize(
    ("plan", "width"),
    [
        (GemmPlan(1, 1, 4, 2, 4), 256),  # a block has half of a row
        (GemmPlan(1, 1, 1, 1, 8), 576),  # it comes in two chunks
        (GemmPlan(1, 1, 4, 1, 4), 1536),  # four warps, and a row takes six
        (GemmPlan(1, 1, 16, 1, 4), 4608),  # rms_norm.cu has two vectors a thread
    ],
    ids=str,
)
def test_what_a_block_does_not_hold_is_two_launches(plan: GemmPlan, width: int) -> None:
    ops, norm = ops_of(4, plan), some_norm(width, torch.bfloat16, CPU)
    x, weight = drawn(1, 3, width), matrix(2, width, 24, CPU)
    assert not cuda_norm_gemm.takes(ops._gemm, x, norm, weight)
    assert torch.equal(ops.norm_linear(x, norm, weight), cases.one_by_one(ops, x, norm, weight))


def test_more_rows_and_other_dtypes_are_two_launches() -> None:
    ops, norm = ops_of(4), some_norm(128, torch.bfloat16, CPU)
    x, weight = drawn(1, 9, 128), matrix(2, 128, 24, CPU)
    assert cuda_norm_gemm.takes(ops._gemm, x[:8], norm, weight)
    for rows, given in (
        (x, norm),
        (x[:0], norm),
        (x[:8, ::2], some_norm(64, norm.weight.dtype, CPU)),
    ):
        assert not cuda_norm_gemm.takes(ops._gemm, rows, given, weight[: rows.shape[1]])
    wide = some_norm(128, torch.float32, CPU)
    assert not cuda_norm_gemm.takes(ops._gemm, x[:8].float(), wide, weight.float())
    assert torch.equal(ops.norm_linear(x, norm, weight), cases.one_by_one(ops, x, norm, weight))
    assert ops.norm_linear(x[:0], norm, weight).shape == (0, 24)


def test_a_rank_of_eight_of_kimis_takes_it() -> None:
    """What tuning finds for the shape must not part a row over blocks unseen."""
    assert cuda_norm_gemm.is_whole(plan_for(GemmShape(1536, 1536), 1), 1536)
