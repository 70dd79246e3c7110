"""verify_attention_invariant.cu on a GPU: against float64, and every row against itself alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kdray.kernels.cuda_invariant import CudaInvariantAttention
from kdray.kernels.loader import KernelLoader
from tests.gpu.test_verify_attention import BATCHES, KIMI, SCALE, make
from tests.kernels.attention_cases import (
    CHAIN,
    Case,
    Part,
    difference,
    every_row_alone,
    expected,
    real_rows,
)

pytestmark = pytest.mark.gpu

BOUND = 2.0**-7
DEMO = (64, 16)
MORE: dict[str, list[Part]] = {
    "ends of segments": [Part(n, nodes=9) for n in (247, 250, 255, 256, 511, 1023)],
    "segments of two lengths": [Part(8180, nodes=17), Part(16382, nodes=9, shape=CHAIN)],
    "a prompt beside trees": [Part(300, known=400), Part(700, nodes=33), Part(5, nodes=9)],
}
ALL = BATCHES | MORE


@pytest.fixture(scope="module")
def attention(loader: KernelLoader) -> CudaInvariantAttention:
    return CudaInvariantAttention(loader)


def attend(attention: CudaInvariantAttention, case: Case, dims: tuple[int, int] = KIMI) -> Tensor:
    out = torch.full((*case.query.shape[:2], dims[0]), torch.nan, device="cuda").bfloat16()
    rows = case.rows("cuda")
    paths = attention.plan(rows, *out.shape[:2])
    attention.attend(out, case.query, case.cache, rows, paths, SCALE[dims])
    return out


def check(
    attention: CudaInvariantAttention,
    parts: Sequence[Part],
    *,
    dims: tuple[int, int] = KIMI,
    **wishes: object,
) -> None:
    case = make(parts, torch.bfloat16, dims=dims, **wishes)  # type: ignore[arg-type]
    out, real = attend(attention, case, dims), real_rows(case).cuda()
    assert difference(out, expected(case, SCALE[dims], dims[0])) < BOUND
    assert not out[~real].any()
    alone = every_row_alone(case, dims[0])
    alone = replace(alone, query=alone.query.cuda(), cache=alone.cache.cuda())
    assert torch.equal(out[real], attend(attention, alone, dims))


@pytest.mark.parametrize("name", ALL)
def test_a_row_has_the_same_bits_by_itself(attention: CudaInvariantAttention, name: str) -> None:
    check(attention, ALL[name])


@pytest.mark.parametrize("heads", [1, 4, 12, 64])
def test_heads_of_any_number(attention: CudaInvariantAttention, heads: int) -> None:
    check(attention, [Part(700, nodes=9), Part(30, nodes=17)], heads=heads)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_the_demos_sizes(attention: CudaInvariantAttention, page_size: int) -> None:
    parts = [Part(700, nodes=9), Part(30, known=90, nodes=5)]
    check(attention, parts, dims=DEMO, page_size=page_size)


@pytest.mark.parametrize("size", [0.0, 6.0, 30.0])
def test_flat_and_peaky_scores(attention: CudaInvariantAttention, size: float) -> None:
    check(attention, [Part(1500, nodes=9), Part(40)], size=size)


def test_a_captured_launch_reads_new_lengths(attention: CudaInvariantAttention) -> None:
    """Plan and attention in a graph, replayed over other rows of the same shapes."""
    cases = [
        make([Part(n, nodes=9), Part(3 * n, nodes=5, padding=4)], torch.bfloat16, seed=n)
        for n in (100, 200, 150)
    ]
    held = cases[1].rows("cuda")
    query, cache = cases[1].query.clone(), cases[1].cache.clone()
    out = torch.empty(*query.shape[:2], 512, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        paths = attention.plan(held, *out.shape[:2])
        attention.attend(out, query, cache, held, paths, SCALE[KIMI])

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in cases:
        new = case.rows("cuda")
        held.num_cached.copy_(new.num_cached)
        held.page_table.zero_()
        held.page_table[:, : new.page_table.shape[1]] = new.page_table
        held.mask.copy_(new.mask)
        query.copy_(case.query)
        cache.zero_()
        cache[: len(case.cache)] = case.cache
        graph.replay()
        assert torch.equal(out, attend(attention, case))
