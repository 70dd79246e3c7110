"""sort_rows.cu and moe_w4a16.cu: their own source, run on the CPU."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels import reference_moe
from kdray.kernels.cuda import CudaOps
from kdray.kernels.cuda_moe import CudaMoe
from kdray.kernels.moe_design import Design
from tests.kernels import moe_cases as cases
from tests.kernels.moe_cases import Sizes
from tests.kernels.simt_loader import simt_loader

SMALL = Sizes(width=64, inner=32, experts=8, top_k=2)


@pytest.fixture(params=[0, 7], ids=["seed 0", "seed 7"])
def moe(request: pytest.FixtureRequest) -> CudaMoe:
    torch.manual_seed(1)
    return CudaMoe(simt_loader(seed=request.param), few_rows=0)


@pytest.mark.parametrize("routing", cases.DEVICE_ROUTINGS)
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 11, 20, 60])
def test_it_equals_float64(moe: CudaMoe, rows: int, routing: str) -> None:
    cases.check(moe, cases.drawn_case(SMALL, rows, routing))


@pytest.mark.parametrize("routing", cases.DEVICE_ROUTINGS)
@pytest.mark.parametrize("rows", [5, 16])
def test_blocks_sort_up_to_128_pairs(moe: CudaMoe, rows: int, routing: str) -> None:
    """More than a warp's, and more rows than a tile's, at one expert."""
    case = cases.drawn_case(Sizes(width=64, inner=32, experts=64, top_k=8), rows, routing)
    assert moe._order(case.expert, 64, 1)[0] is None
    cases.check(moe, case)


@pytest.mark.parametrize("rows", [1, 8, 30])
def test_padding_costs_no_weights(moe: CudaMoe, rows: int) -> None:
    cases.check_padding(moe, cases.drawn_case(SMALL, rows, "padding"))


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(width=96, inner=32, experts=16, top_k=1),
        Sizes(width=160, inner=96, experts=64, top_k=8),
        Sizes(width=544, inner=64, experts=8, top_k=3),  # shares of 2 steps, the last of 1
        Sizes(width=1696, inner=32, experts=4, top_k=2),  # shares of 4, the last warps without
        Sizes(width=2048, inner=128, experts=4, top_k=1),  # whole slots, two a share
    ],
    ids=str,
)
def test_any_sizes(moe: CudaMoe, sizes: Sizes) -> None:
    for rows in (2, 9):
        cases.check(moe, cases.drawn_case(sizes, rows))


def test_a_row_has_the_same_bits_in_any_batch(moe: CudaMoe) -> None:
    """Batches that warps sort, that are sorted before, and in tiles of 8, 16 and 32 rows."""
    case = cases.drawn_case(Sizes(width=1056, inner=64, experts=4, top_k=2), 40)
    others = [torch.tensor([5]), torch.arange(7), torch.arange(2, 12), torch.arange(39, 9, -1)]
    cases.check_bits(moe, case, others)


def test_warps_with_many_units() -> None:
    """More than they look for at once."""
    case = cases.drawn_case(Sizes(width=1696, inner=32, experts=64, top_k=2), 19)
    cases.check(CudaMoe(simt_loader(seed=3)), case)


DESIGNS = [
    Design(slot_steps=4, slots=2, parts=1, by_lanes=False),
    Design(slots=1, catch_up=False, by_lanes=False),
    Design(list_bytes=192),  # too few
    Design(slot_steps=4, slots=2, parts=1),
    Design(by_lanes=False),
]


@pytest.mark.parametrize("design", DESIGNS, ids=str)
def test_other_designs_give_the_same_bits(design: Design) -> None:
    case = cases.drawn_case(Sizes(width=544, inner=96, experts=32, top_k=4), 26)
    wanted = case.run(CudaMoe(simt_loader(seed=1)))
    other = CudaMoe(simt_loader(seed=2), design=design)
    assert torch.equal(case.run(other), wanted)
    cases.check(other, case)


def test_long_batches_go_piece_by_piece(moe: CudaMoe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdray.kernels.cuda_moe.MAX_ROWS", 4)
    cases.check(moe, cases.drawn_case(SMALL, 10))


@pytest.mark.parametrize("column_tiles", [1, 2, 4])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, SMALL),
        (70, SMALL),
        (65, Sizes(width=0, inner=0, experts=384, top_k=8)),
        (300, Sizes(width=0, inner=0, experts=1024, top_k=8)),
    ],
    ids=str,
)
def test_rows_are_sorted(moe: CudaMoe, rows: int, sizes: Sizes, column_tiles: int) -> None:
    for routing in cases.DEVICE_ROUTINGS:
        expert = cases.chosen(routing, rows, sizes, torch.device("cpu"))
        cases.check_sorting(moe, expert, sizes.experts, column_tiles)


def test_ops_choose_the_kernel_or_the_reference() -> None:
    torch.manual_seed(4)
    ops = CudaOps(torch.device("cpu"), simt_loader(seed=4))
    case = cases.drawn_case(SMALL, 6)
    given = (case.expert, case.weight, case.experts)
    found = ops.moe_w4a16(case.x, *given, case.shared)
    assert torch.equal(found, case.run(CudaMoe(simt_loader(seed=9))))
    wide = case.x.float(), *given, case.shared.float()
    assert torch.equal(ops.moe_w4a16(*wide), reference_moe.moe_w4a16(*wide))
