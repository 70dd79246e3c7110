"""How products of few rows are cut, and their reference."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kdray.kernels import reference_gemm
from kdray.kernels.gemm_plan import (
    MOST_GROUPS,
    TOKEN_TILES,
    WORK_WORDS,
    GemmShape,
    chunk_of,
    fits,
    shared_bytes,
    static_bytes,
    token_tiles_for,
    work_words,
)
from kdray.kernels.gemm_table import PLANS, RUNS, pair_plan_for, plan_for, runs_of
from kdray.kernels.loader import MAX_BLOCK_BYTES

SIZES = (32, 96, 512, 1024, 1536, 2304, 7168, 18432)
SHAPES = [
    *(GemmShape(inputs, outputs) for inputs, outputs in product(SIZES, (8, *SIZES, 163840))),
    *(GemmShape(*sizes, heads) for sizes in ((128, 512), (512, 128)) for heads in (1, 8, 64)),
]


@pytest.mark.parametrize("tiles", TOKEN_TILES)
def test_every_shape_has_a_plan_that_fits(tiles: int) -> None:
    for shape in SHAPES:
        plan = plan_for(shape, tiles)
        assert fits(plan, tiles)
        assert plan.runs == runs_of(shape), "bits would depend on the batch"
        whole = shared_bytes(plan, tiles, shape.steps) + static_bytes(plan, tiles)
        assert whole <= MAX_BLOCK_BYTES
        assert chunk_of(plan, tiles, shape.steps) in ((1, 2) if tiles > 1 else range(1, 16, 2))
        assert work_words(shape, tiles, plan, MOST_GROUPS) <= WORK_WORDS


@pytest.mark.parametrize("tiles", TOKEN_TILES)
def test_a_pairs_plan_has_the_runs_of_each(tiles: int) -> None:
    router, shared = GemmShape(7168, 384), GemmShape(7168, 512)
    plan = pair_plan_for(router, shared, tiles)
    assert plan is not None and fits(plan, tiles)
    assert plan.runs == runs_of(router) == runs_of(shared)
    assert pair_plan_for(router, GemmShape(7168, 20480), tiles) is None


def test_measured_plans_are_of_measured_runs() -> None:
    for (*key, tiles), fields in PLANS.items():
        shape = GemmShape(*key)
        assert (shape.inputs, shape.outputs, shape.heads) in RUNS
        plan = plan_for(shape, tiles)
        assert (plan.row_tiles, plan.warps_m, plan.warps_k, plan.split, plan.slots) == fields


def test_runs_are_powers_of_two_with_steps_in_each() -> None:
    for shape in SHAPES:
        runs = runs_of(shape)
        assert runs & (runs - 1) == 0 and runs <= shape.steps


@pytest.mark.parametrize(("tokens", "tiles"), [(1, 1), (8, 1), (9, 2), (17, 4), (33, 8), (128, 8)])
def test_tiles_that_hold_the_tokens(tokens: int, tiles: int) -> None:
    assert token_tiles_for(tokens) == tiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_sums_in_fp32_where_fp32_is_asked_for(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 64).to(dtype), torch.randn(64, 40).to(dtype)
    exact = x.double() @ weight.double()
    found = reference_gemm.linear(x, weight, dtype=torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    mixed = reference_gemm.linear(x, weight.float(), dtype=torch.float32)
    torch.testing.assert_close(mixed.double(), exact, rtol=1e-5, atol=1e-4)
    more = torch.randn(3, 40).to(dtype)
    plain = reference_gemm.linear(x, weight)
    assert plain.dtype == dtype
    assert torch.equal(reference_gemm.linear(x, weight, add=more), more + plain)


def test_the_reference_of_a_gated_product() -> None:
    x, weight = torch.randn(5, 32), torch.randn(32, 24)
    gate, up = (x @ weight).chunk(2, dim=-1)
    wanted = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(reference_gemm.gated_linear(x, weight), wanted)
    found, gates = reference_gemm.linear_and_gated(x, weight[:, 3:], weight, dtype=torch.float64)
    torch.testing.assert_close(found, x.double() @ weight[:, 3:].double())
    torch.testing.assert_close(gates, wanted)
