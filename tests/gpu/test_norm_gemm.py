"""norm_linear on a GPU: the bits of its two launches, alone and in graphs."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels import cuda_norm_gemm
from kdray.kernels.cuda import CudaOps
from kdray.kernels.gemm_plan import GemmShape, candidates
from kdray.kernels.gemm_table import plan_for
from kdray.kernels.loader import KernelLoader
from tests.gpu.replays import check_replays
from tests.kernels import norm_gemm_cases as cases
from tests.kernels.absorb_cases import Absorbing
from tests.kernels.fused_cases import ATTENTIONS, some_norm
from tests.kernels.gemm_cases import drawn, matrix, settle

pytestmark = pytest.mark.gpu

SHAPES = [(1536, 1536), (1536, 768), (1536, 3072), (128, 384)]


@pytest.fixture(scope="module")
def ops(loader: KernelLoader) -> CudaOps:
    return CudaOps(loader.device, loader)


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_it_is_its_two_launches(ops: CudaOps, width: int, outputs: int) -> None:
    for tokens in range(1, 9):
        cases.check_normed(ops, tokens, width, outputs, gap=576)
    cases.check_alone(ops, 65, width, outputs)


def test_it_is_however_it_is_cut(loader: KernelLoader) -> None:
    """By every plan that has whole rows in a block."""
    shape = GemmShape(1536, 264)
    whole = [
        plan
        for runs in (2, 4, 8, 16)
        for plan in candidates(shape, runs, 1)
        if cuda_norm_gemm.is_whole(plan, shape.inputs)
    ]
    assert len({plan.runs for plan in whole}) > 1 < len({plan.warps_m for plan in whole})
    for plan in whole:
        ops = CudaOps(loader.device, loader)
        ops._gemm.plan = plan
        cases.check_normed(ops, 7, shape.inputs, shape.outputs)


def test_squares_are_added_up_in_the_norms_order(loader: KernelLoader) -> None:
    ops = CudaOps(loader.device, loader)
    ops._gemm.plan = plan_for(GemmShape(1536, 1536), 1)
    cases.check_order(ops, 1536)


@pytest.mark.parametrize("tokens", [1, 5, 8, 9])
def test_it_follows_its_input_in_a_graph(ops: CudaOps, tokens: int) -> None:
    """As in a layer: behind the product that writes its rows, in front of what reads its queries
    and, two kernels on, those same rows' ends."""
    x = torch.zeros(tokens, 7168, dtype=torch.bfloat16, device=ops.device)
    down, up = (
        (matrix(n, *shape, ops.device).T * shape[0] ** -0.5).T
        for n, shape in enumerate([(7168, 2112), (1536, 1536)])
    )
    norm = some_norm(1536, torch.bfloat16, ops.device)
    given = Absorbing.of(ops, tokens, ATTENTIONS["kimi, 8 heads"], fp8=False)
    settle(ops.device)

    def run(at_once: bool) -> list[torch.Tensor]:
        latent, given.kv = ops.linear(x, down).split([1536, 576], dim=1)
        make = ops.norm_linear if at_once else lambda *of: cases.one_by_one(ops, *of)
        given.query = make(latent, norm, up).view(tokens, 8, 192)
        cache = torch.zeros_like(given.cache)
        return [given.query, given.at_once(ops, cache), cache]

    check_replays(lambda: run(True), lambda: run(False), [x])


def test_the_same_again_a_thousand_times(ops: CudaOps) -> None:
    """In a chain where each reads what the one in front has just written."""
    up = (matrix(1, 1536, 1536, ops.device).T * 1536**-0.5).T
    norm = some_norm(1536, torch.bfloat16, ops.device)
    first = drawn(2, 8, 1536).to(ops.device)
    settle(ops.device)
    x = wanted = first
    for _ in range(1000):
        x = ops.norm_linear(x, norm, up)
    for _ in range(1000):
        wanted = cases.one_by_one(ops, wanted, norm, up)
    assert torch.equal(x, wanted) and bool(x.isfinite().all()) and bool(x.any())
