"""Routed INT4 experts of one row or two on a GPU: the bits of two launches, always."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from kdray.kernels.cuda_moe import CudaMoe
from kdray.kernels.loader import KernelLoader
from kdray.kernels.moe_layout import PackedExperts
from tests.kernels import moe_cases as cases
from tests.kernels.moe_cases import Case, Sizes

pytestmark = pytest.mark.gpu

KIMI = Sizes(width=7168, inner=256, experts=384, top_k=8)
ODD = [
    Sizes(width=64, inner=32, experts=8, top_k=2),  # most blocks have no columns
    Sizes(width=96, inner=96, experts=16, top_k=1),
    Sizes(width=512, inner=64, experts=64, top_k=8),
    Sizes(width=544, inner=160, experts=48, top_k=3),
    Sizes(width=1696, inner=32, experts=4, top_k=2),
    Sizes(width=96, inner=256, experts=32, top_k=20),  # more pairs than a warp sorts
    Sizes(width=7168, inner=512, experts=16, top_k=8),  # two rows do not fit
]


@pytest.fixture(scope="module")
def few(loader: KernelLoader) -> CudaMoe:
    return CudaMoe(loader)


@pytest.fixture(scope="module")
def plain(loader: KernelLoader) -> CudaMoe:
    return CudaMoe(loader, few_rows=0)


@cache
def experts_of(sizes: Sizes) -> PackedExperts:
    return cases.drawn_experts(sizes, torch.device("cuda"))


def drawn(sizes: Sizes, rows: int, routing: str = "random") -> Case:
    return cases.drawn_case(sizes, rows, routing, experts_of(sizes), "cuda")


def without(case: Case, row: int, choices: slice) -> Case:
    """Of no expert there."""
    case.expert[row, choices], case.weight[row, choices] = -1, 0.0
    return case


def padded() -> list[Case]:
    """Whole rows of padding, the first, the second or all; and a choice of none among others."""
    whole = slice(None)
    return [
        without(drawn(KIMI, 1), 0, whole),
        without(drawn(KIMI, 2), 0, whole),
        without(drawn(KIMI, 2), 1, whole),
        without(without(drawn(KIMI, 2), 0, whole), 1, whole),
        without(drawn(KIMI, 1), 0, slice(3, 4)),
        without(drawn(KIMI, 2), 1, slice(0, 7)),
    ]


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    bits = [t.view(torch.int16) for t in (*found, *wanted)]
    return all(map(torch.equal, bits[: len(found)], bits[len(found) :]))


def test_it_is_what_runs(few: CudaMoe) -> None:
    """Blocks count themselves, modulo those of two launches."""
    before = int(few.few._begun)
    drawn(KIMI, 2).run(few)
    assert int(few.few._begun) != before
    drawn(KIMI, 3).run(few)
    drawn(KIMI, 1).run(few)
    assert int(few.few._begun) == before


@pytest.mark.parametrize("rows", [1, 2])
def test_random_routings(few: CudaMoe, plain: CudaMoe, rows: int) -> None:
    for _ in range(300):
        cases.check_same_bits(few, plain, drawn(KIMI, rows))


@pytest.mark.parametrize("sizes", [KIMI, *ODD], ids=str)
@pytest.mark.parametrize("routing", cases.DEVICE_ROUTINGS)
def test_any_sizes(few: CudaMoe, plain: CudaMoe, sizes: Sizes, routing: str) -> None:
    for rows in (1, 2):
        case = drawn(sizes, rows, routing)
        cases.check(few, case)
        cases.check_same_bits(few, plain, case)


def test_padding(few: CudaMoe, plain: CudaMoe) -> None:
    for case in padded():
        cases.check_same_bits(few, plain, case)
        nobody = (case.expert < 0).all(1)
        assert torch.equal(case.run(few)[nobody], case.shared[nobody])
    for rows in (1, 2):
        cases.check_padding(few, drawn(KIMI, rows, "padding"))


@pytest.mark.parametrize("rows", [1, 2])
def test_many_launches_give_the_same_bits(few: CudaMoe, plain: CudaMoe, rows: int) -> None:
    """What was not emptied, or was read before it was there, would show."""
    case = drawn(KIMI, rows)
    wanted = case.run(plain)
    for _ in range(500):
        assert same([case.run(few)], [wanted])


def test_sizes_in_turn(few: CudaMoe, plain: CudaMoe) -> None:
    """All by one workspace, waited for one by one and not; and with other kernels between."""
    mixed = [drawn(KIMI, rows) for rows in (1, 2, 3, 1, 9)] + [drawn(ODD[2], 1), *padded()]
    mixed += [drawn(sizes, 2) for sizes in ODD]
    wanted = [case.run(plain) for case in mixed]
    for _ in range(50):
        for case, out in zip(mixed, wanted, strict=True):
            assert same([case.run(few)], [out])
        assert same([case.run(few) for case in mixed], wanted)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_graph_follows_its_inputs(few: CudaMoe, plain: CudaMoe, rows: int) -> None:
    """Replays with other rows, routed otherwise or to nobody, an odd number of launches each."""
    case = drawn(KIMI, rows)
    graph, found = captured(few, [case] * 3)
    for routing in cases.DEVICE_ROUTINGS * 20:
        other = drawn(KIMI, rows, routing)
        for name in ("x", "expert", "weight", "shared"):
            getattr(case, name).copy_(getattr(other, name))
        graph.replay()
        assert same(found, [other.run(plain)] * 3)


def test_graphs_of_sizes_in_turn(few: CudaMoe, plain: CudaMoe) -> None:
    """Two graphs and launches of their own, by one workspace."""
    first = [drawn(KIMI, 1), drawn(KIMI, 2), drawn(ODD[2], 1)]
    second = [drawn(KIMI, 2, "few experts"), drawn(KIMI, 5), *padded()]
    alone = drawn(KIMI, 1, "neighbours")
    wanted = [case.run(plain) for case in (*first, *second, alone)]
    (one, found), (two, others) = captured(few, first), captured(few, second)
    for _ in range(200):
        one.replay()
        two.replay()
        two.replay()
        last = alone.run(few)
        one.replay()
        assert same([*found, *others, last], wanted)


def captured(moe: CudaMoe, given: Sequence[Case]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    for case in given:
        case.run(moe)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [case.run(moe) for case in given]
    return graph, found


def test_what_is_no_number_arrives(few: CudaMoe) -> None:
    """It is not taken for what has not come yet, which would be waited for."""
    case = drawn(KIMI, 2)
    case.x[0, 5] = float("nan")
    out = case.run(few)
    assert out[0].isnan().all() and not out[1].isnan().any()


def test_it_may_be_cooperative(loader: KernelLoader, plain: CudaMoe) -> None:
    moe = CudaMoe(loader, overlap=False)
    for rows in (1, 2, 1):
        cases.check_same_bits(moe, plain, drawn(KIMI, rows))
