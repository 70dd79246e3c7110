"""sort_many_rows.cu and moe_w4a16_many.cu: their own source, run on the CPU."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels.cuda_moe import MANY_ROWS, CudaMoe, rows_for_many
from kdray.kernels.cuda_moe_many import CudaMoeMany
from tests.kernels import moe_cases as cases
from tests.kernels.moe_cases import Sizes
from tests.kernels.simt_loader import SimtLoader, simt_loader

SMALL = Sizes(width=64, inner=32, experts=8, top_k=2)


@pytest.fixture(params=[0, 7], ids=["seed 0", "seed 7"])
def many(request: pytest.FixtureRequest) -> CudaMoe:
    torch.manual_seed(1)
    return CudaMoe(simt_loader(seed=request.param), many=True)


@pytest.fixture
def few() -> CudaMoe:
    return CudaMoe(simt_loader(seed=2), many=False)


@pytest.mark.parametrize("routing", cases.DEVICE_ROUTINGS)
@pytest.mark.parametrize("rows", [0, 1, 11, 70])
def test_it_equals_float64(many: CudaMoe, rows: int, routing: str) -> None:
    """70 rows of one expert take two tiles."""
    cases.check(many, cases.drawn_case(SMALL, rows, routing))


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(width=96, inner=32, experts=16, top_k=1),  # a last stage of one step
        Sizes(width=160, inner=96, experts=12, top_k=8),
        Sizes(width=544, inner=160, experts=8, top_k=3),  # a last slice of one warp, of two
        Sizes(width=1120, inner=64, experts=4, top_k=2),  # 3 steps a sum: it ends within a stage
        Sizes(width=2048, inner=128, experts=4, top_k=1),  # whole stages, sums and slices
    ],
    ids=str,
)
def test_a_row_has_the_bits_that_it_has_among_few(
    many: CudaMoe, few: CudaMoe, sizes: Sizes
) -> None:
    for rows in (3, 21):
        case = cases.drawn_case(sizes, rows)
        cases.check(many, case)
        cases.check_same_bits(many, few, case)


def test_full_tiles_give_the_same_bits(many: CudaMoe, few: CudaMoe) -> None:
    """An expert with 17 rows in its second tile, another with none."""
    case = cases.drawn_case(Sizes(width=128, inner=32, experts=3, top_k=1), 120)
    case.expert[:] = torch.tensor([0] * 81 + [2] * 39)[torch.randperm(120), None]
    cases.check_same_bits(many, few, case)


def test_padding_costs_no_weights(many: CudaMoe) -> None:
    for rows in (1, 30):
        cases.check_padding(many, cases.drawn_case(SMALL, rows, "padding"))


@pytest.mark.parametrize("rows", [MANY_ROWS - 1, MANY_ROWS])
def test_many_rows_take_their_own_kernel(rows: int) -> None:
    loader = simt_loader()
    case = cases.drawn_case(Sizes(width=32, inner=32, experts=2, top_k=1), rows, "padding")
    case.run(CudaMoe(loader))
    assert isinstance(loader, SimtLoader)
    used = {name for name, _ in loader._kernels}
    assert ("moe_w4a16_many" in used, "moe_w4a16" in used) == (rows == MANY_ROWS, rows < MANY_ROWS)


def test_the_more_experts_the_more_rows_it_takes() -> None:
    assert rows_for_many(384, 8) == 1008 and rows_for_many(2, 1) == MANY_ROWS


def test_nothing_routed(many: CudaMoe) -> None:
    case = cases.drawn_case(SMALL, 5)
    case.expert.fill_(-1)
    case.weight.zero_()
    assert torch.equal(case.run(many), case.shared)


def test_more_tiles_than_a_block_lists() -> None:
    case = cases.drawn_case(SMALL, 30)
    given = (case.x, case.expert, case.weight, case.experts, case.shared)
    wanted = CudaMoeMany(simt_loader(seed=3), 3).moe_w4a16(*given)
    assert torch.equal(CudaMoeMany(simt_loader(seed=4), 3, 4).moe_w4a16(*given), wanted)


def test_long_batches_go_piece_by_piece(many: CudaMoe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdray.kernels.cuda_moe.MAX_ROWS", 4)
    cases.check(many, cases.drawn_case(SMALL, 10))


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, SMALL),
        (300, SMALL),
        (300, Sizes(width=0, inner=0, experts=384, top_k=8)),
        (515, Sizes(width=0, inner=0, experts=8, top_k=8)),  # two turns of a block
    ],
    ids=str,
)
def test_rows_are_sorted(rows: int, sizes: Sizes) -> None:
    moe = CudaMoeMany(simt_loader(seed=5), 3)
    for routing in cases.DEVICE_ROUTINGS:
        expert = cases.chosen(routing, rows, sizes, torch.device("cpu"))
        cases.check_placing(moe, expert, sizes.experts)
