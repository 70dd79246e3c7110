"""Routed INT4 experts of many rows on a GPU: the reference, the few-row kernel's bits, graphs."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kdray.kernels.cuda_moe import CudaMoe
from kdray.kernels.cuda_moe_many import CudaMoeMany
from kdray.kernels.loader import KernelLoader
from kdray.kernels.moe_layout import PackedExperts
from tests.kernels import moe_cases as cases
from tests.kernels.moe_cases import Case, Sizes

pytestmark = pytest.mark.gpu

KIMI = Sizes(width=7168, inner=256, experts=384, top_k=8)
ODD = [
    Sizes(width=64, inner=32, experts=8, top_k=2),
    Sizes(width=96, inner=96, experts=16, top_k=1),
    Sizes(width=544, inner=160, experts=48, top_k=3),
    Sizes(width=1120, inner=64, experts=4, top_k=2),
    Sizes(width=512, inner=64, experts=1024, top_k=8),  # more tiles than a block lists
    Sizes(width=7168, inner=2048, experts=12, top_k=8),  # a rank that is alone
]


@pytest.fixture(scope="module")
def many(loader: KernelLoader) -> CudaMoe:
    return CudaMoe(loader, many=True)


@pytest.fixture(scope="module")
def few(loader: KernelLoader) -> CudaMoe:
    return CudaMoe(loader, many=False)


@cache
def experts_of(sizes: Sizes) -> PackedExperts:
    return cases.drawn_experts(sizes, torch.device("cuda"))


def drawn(sizes: Sizes, rows: int, routing: str = "random") -> Case:
    return cases.drawn_case(sizes, rows, routing, experts_of(sizes), "cuda")


@pytest.mark.parametrize("routing", cases.DEVICE_ROUTINGS)
@pytest.mark.parametrize("rows", [3, 130, 577, 2048])
def test_kimi(many: CudaMoe, few: CudaMoe, rows: int, routing: str) -> None:
    case = drawn(KIMI, rows, routing)
    cases.check(many, case)
    cases.check_same_bits(many, few, case)


@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_any_sizes(many: CudaMoe, few: CudaMoe, sizes: Sizes) -> None:
    for rows in (1, 30, 130, 2300):
        for routing in ("random", "one expert"):
            case = drawn(sizes, rows, routing)
            cases.check(many, case)
            cases.check_same_bits(many, few, case)


def test_padding_costs_no_weights(many: CudaMoe) -> None:
    for rows in (4, 700):
        cases.check_padding(many, drawn(KIMI, rows, "padding"))


def test_many_launches_give_the_same_bits(many: CudaMoe) -> None:
    """A race would show."""
    for rows in (300, 2048):
        case = drawn(KIMI, rows)
        first = case.run(many)
        for _ in range(100):
            assert torch.equal(case.run(many), first)


@pytest.mark.parametrize("rows", [256, 2048])
def test_a_graph_follows_its_inputs(many: CudaMoe, rows: int) -> None:
    """Nothing of the routing is frozen with the launch."""
    case, other = drawn(KIMI, rows), drawn(KIMI, rows, "few experts")
    wanted = other.run(many)
    case.run(many)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [case.run(many) for _ in range(3)]
    for name in ("x", "expert", "weight", "shared"):
        getattr(case, name).copy_(getattr(other, name))
    graph.replay()
    for result in found:
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("rows", [1, 65, 577, 2048])
def test_rows_are_sorted(loader: KernelLoader, rows: int) -> None:
    moe = CudaMoeMany(loader, 132)
    for sizes in (ODD[0], KIMI, ODD[4]):
        for routing in cases.DEVICE_ROUTINGS:
            expert = cases.chosen(routing, rows, sizes, torch.device("cuda"))
            cases.check_placing(moe, expert, sizes.experts)
