"""Routed INT4 experts on a GPU: sizes of a rank of Kimi K2.6, odd ones, graphs, and bits."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kdray.kernels.cuda import CudaOps
from kdray.kernels.cuda_moe import CudaMoe, column_tiles
from kdray.kernels.loader import KernelLoader
from kdray.kernels.moe_layout import PackedExperts
from tests.kernels import moe_cases as cases
from tests.kernels.moe_cases import Case, Sizes

pytestmark = pytest.mark.gpu

KIMI = Sizes(width=7168, inner=256, experts=384, top_k=8)
SMALL = Sizes(width=64, inner=32, experts=8, top_k=2)
ODD = [
    SMALL,
    Sizes(width=96, inner=96, experts=16, top_k=1),
    Sizes(width=512, inner=64, experts=64, top_k=8),
    Sizes(width=544, inner=160, experts=48, top_k=3),
    Sizes(width=1696, inner=32, experts=4, top_k=2),
    Sizes(width=7168, inner=2048, experts=12, top_k=8),  # a rank that is alone
]


@pytest.fixture(scope="module")
def moe(loader: KernelLoader) -> CudaMoe:
    return CudaMoe(loader)


@cache
def experts_of(sizes: Sizes) -> PackedExperts:
    return cases.drawn_experts(sizes, torch.device("cuda"))


def drawn(sizes: Sizes, rows: int, routing: str = "random") -> Case:
    return cases.drawn_case(sizes, rows, routing, experts_of(sizes), "cuda")


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 17, 33, 65, 200, 577, 2048])
def test_kimi(moe: CudaMoe, rows: int) -> None:
    cases.check(moe, drawn(KIMI, rows))


@pytest.mark.parametrize("routing", cases.DEVICE_ROUTINGS)
@pytest.mark.parametrize("rows", [0, 3, 40, 577, 2300])
def test_any_routing(moe: CudaMoe, rows: int, routing: str) -> None:
    for sizes in (SMALL, ODD[2]):
        cases.check(moe, drawn(sizes, rows, routing))


@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_any_sizes(moe: CudaMoe, sizes: Sizes) -> None:
    for rows in (1, 7, 30, 130):
        cases.check(moe, drawn(sizes, rows))


@pytest.mark.parametrize("rows", [1, 4, 68, 136])
def test_padding_costs_no_weights(moe: CudaMoe, rows: int) -> None:
    cases.check_padding(moe, drawn(KIMI, rows, "padding"))


def test_a_row_has_the_same_bits_in_any_batch(moe: CudaMoe) -> None:
    case = drawn(KIMI, 640)
    assert {column_tiles(8 * rows, 384) for rows in (64, 300, 640)} == {1, 2, 4}
    others = [torch.tensor([639]), torch.arange(100, 104), torch.arange(64), torch.arange(300)]
    cases.check_bits(moe, case, [rows.cuda() for rows in others])


def test_many_launches_give_the_same_bits(moe: CudaMoe) -> None:
    """A race between the halves, or arrivals that are left over, would show."""
    for rows in (1, 33):
        case = drawn(KIMI, rows)
        first = case.run(moe)
        for _ in range(300):
            assert torch.equal(case.run(moe), first)


@pytest.mark.parametrize("rows", [1, 4, 24, 600])
def test_a_graph_follows_its_inputs(moe: CudaMoe, rows: int) -> None:
    """Nothing of the routing is frozen with the launch."""
    case, other = drawn(KIMI, rows), drawn(KIMI, rows, "few experts")
    wanted = other.run(moe)
    case.run(moe)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [case.run(moe) for _ in range(3)]
    for name in ("x", "expert", "weight", "shared"):
        getattr(case, name).copy_(getattr(other, name))
    graph.replay()
    for result in found:
        assert torch.equal(result, wanted)


def test_it_may_start_before_the_kernel_ahead_ends(loader: KernelLoader) -> None:
    moe = CudaMoe(loader, overlap=True)
    for rows in (1, 9, 65):
        cases.check(moe, drawn(KIMI, rows))


@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 65, 577, 2048])
def test_rows_are_sorted(moe: CudaMoe, rows: int, tiles: int) -> None:
    for sizes in (SMALL, KIMI, Sizes(width=0, inner=0, experts=1024, top_k=8)):
        for routing in cases.DEVICE_ROUTINGS:
            expert = cases.chosen(routing, rows, sizes, torch.device("cuda"))
            cases.check_sorting(moe, expert, sizes.experts, tiles)


def test_rows_of_float32_run_by_the_reference(device: torch.device) -> None:
    ops, case = CudaOps(device), drawn(SMALL, 5)
    found = ops.moe_w4a16(
        case.x.float(), case.expert, case.weight, case.experts, case.shared.float()
    )
    assert found.dtype == torch.float32
    error = (found - case.reference().float()).norm() / found.norm()
    assert error < 0.01
