"""skinny_gemm on a GPU: a rank's shapes of Kimi K2.6 and odd ones against float64, in graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdray.kernels.cuda_fused import CudaFused
from kdray.kernels.cuda_gemm import MOST_TOKENS, CudaGemm
from kdray.kernels.gemm_plan import GemmShape, candidates
from kdray.kernels.gemm_table import runs_of
from kdray.kernels.loader import KernelLoader
from tests.gpu.replays import check_replays
from tests.kernels import gemm_cases as cases

pytestmark = pytest.mark.gpu

TOKENS = [1, 4, 8, 9, 16, 17, 32, 33, 64, 65, MOST_TOKENS]
# (inputs, outputs, dtype of the product)
MATRICES = [
    (7168, 2112, torch.bfloat16),
    (1536, 1536, torch.bfloat16),
    (1024, 7168, torch.bfloat16),
    (7168, 384, torch.float32),
    (7168, 512, torch.bfloat16),
    (256, 7168, torch.bfloat16),
    (7168, 20480, torch.float32),
    (32, 8, torch.float32),
    (4128, 1000, torch.bfloat16),
]
HEADS = [(8, 128, 512), (8, 512, 128), (3, 64, 24)]


@pytest.fixture(scope="module")
def gemm(loader: KernelLoader) -> CudaGemm:
    return CudaGemm(loader)


@pytest.mark.parametrize(("inputs", "outputs", "dtype"), MATRICES)
def test_linear(gemm: CudaGemm, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    for tokens in TOKENS:
        cases.check_linear(gemm, tokens, inputs, outputs, dtype=dtype)
    cases.check_linear(gemm, 9, inputs, outputs, dtype=dtype, add=True, gap=24)


@pytest.mark.parametrize(("heads", "inputs", "outputs"), HEADS)
def test_per_head(gemm: CudaGemm, heads: int, inputs: int, outputs: int) -> None:
    for tokens in TOKENS:
        cases.check_heads(gemm, tokens, heads, inputs, outputs)


@pytest.mark.parametrize(("inputs", "inner"), [(7168, 256), (7168, 2304), (96, 8)])
def test_gated_linear(gemm: CudaGemm, loader: KernelLoader, inputs: int, inner: int) -> None:
    """It is the plain product followed by swiglu, bit for bit where runs are as many."""
    fused = CudaFused(loader)
    for tokens in TOKENS:
        cases.check_gated(gemm, tokens, inputs, inner)
        x = cases.drawn(31, tokens, inputs).to(gemm.device)
        weight = cases.matrix(32, inputs, 2 * inner, gemm.device)
        cases.settle(gemm.device)
        assert torch.equal(gemm.gated_linear(x, weight), fused.swiglu(gemm.linear(x, weight)))


@pytest.mark.parametrize(("inputs", "outputs", "inner"), [(7168, 384, 256), (7168, 72, 24)])
def test_a_pair_is_its_two_products(gemm: CudaGemm, inputs: int, outputs: int, inner: int) -> None:
    for tokens in TOKENS:
        cases.check_pair(gemm, tokens, inputs, outputs, inner)
    assert gemm._work is not None and bool((gemm._work == -1).all())


@pytest.mark.parametrize("tokens", [1, 9, 65])
def test_a_pair_in_a_graph_follows_its_input(gemm: CudaGemm, tokens: int) -> None:
    """Behind the product that writes its rows, and in front of one that reads what it made."""
    x = cases.drawn(1, tokens, 256).to(gemm.device)
    shapes = [(256, 7168), (7168, 384), (7168, 512), (256, 7168)]
    up, weight, gate_up, down = (
        (cases.matrix(n, *shape, gemm.device).T * shape[0] ** -0.5).T
        for n, shape in enumerate(shapes)
    )
    cases.settle(gemm.device)

    def run(pair: bool) -> tuple[Tensor, Tensor]:
        rows = gemm.linear(x, up)
        if pair:
            logits, inner = gemm.linear_and_gated(rows, weight, gate_up, dtype=torch.float32)
        else:
            logits = gemm.linear(rows, weight, dtype=torch.float32)
            inner = gemm.gated_linear(rows, gate_up)
        return logits, gemm.linear(inner, down)

    check_replays(lambda: run(True), lambda: run(False), [x])


@pytest.mark.parametrize(("inputs", "outputs", "dtype"), MATRICES)
def test_a_row_does_not_depend_on_its_batch(
    gemm: CudaGemm, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    """Alone, and among 64 others."""
    cases.check_alone(gemm, 65, inputs, outputs)


@pytest.mark.parametrize("tokens", [5, 40])
def test_every_plan_gives_the_same_bits(loader: KernelLoader, tokens: int) -> None:
    shape = GemmShape(1536, 264)
    tiles = 1 if tokens <= 8 else 8
    plans = list(candidates(shape, runs_of(shape), tiles))
    assert len({plan.split for plan in plans}) > 2
    gemms = {plan: CudaGemm(loader, plan=plan) for plan in plans}
    cases.check_plans(gemms, tokens, shape.inputs, shape.outputs)


def test_the_same_again_a_thousand_times(gemm: CudaGemm) -> None:
    """Blocks that leave sums for another find the workspace empty, whatever came before."""
    inputs = [cases.drawn(n, tokens, 7168).cuda() for n, tokens in enumerate((1, 8, 33, 64))]
    weights = [cases.matrix(n, 7168, outputs, gemm.device) for n, outputs in enumerate((384, 512))]
    cases.settle(gemm.device)
    pairs = [(x, weight) for x in inputs for weight in weights]
    first = [gemm.linear(x, weight) for x, weight in pairs]
    for _ in range(1000):
        found = [gemm.linear(x, weight) for x, weight in pairs]
    assert all(map(torch.equal, found, first))
    assert gemm._work is not None and bool((gemm._work == -1).all())


def chain(gemm: CudaGemm) -> tuple[Callable[[], Tensor], Tensor]:
    """Products that read what the product in front has just written, and the first's input."""
    x = torch.zeros(9, 7168, dtype=torch.bfloat16, device=gemm.device)
    down, up = (
        (cases.matrix(n, *shape, gemm.device).T * (shape[0] ** -0.5 / 4)).T
        for n, shape in enumerate([(7168, 512), (256, 7168)])
    )
    cases.settle(gemm.device)

    def run() -> Tensor:
        y = x
        for _ in range(20):
            y = gemm.linear(gemm.gated_linear(y, down), up, add=y)
        return y

    return run, x


def test_a_chain_in_a_graph_follows_its_input(gemm: CudaGemm) -> None:
    run, x = chain(gemm)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for seed in range(3):
        x.copy_(cases.drawn(seed, *x.shape))
        graph.replay()
        torch.cuda.synchronize()
        assert found.isfinite().all()
        assert torch.equal(found, run())
        alone = found[2].clone()
        x[:2], x[3:] = 0, 0
        graph.replay()
        assert torch.equal(found[2], alone)
