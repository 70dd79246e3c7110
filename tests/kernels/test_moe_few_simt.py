"""moe_w4a16_few.cu: its own source, run on the CPU, bit for bit against moe_w4a16.cu's."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels.cuda_moe import FEW_ROWS, CudaMoe
from tests.kernels import moe_cases as cases
from tests.kernels.moe_cases import Sizes
from tests.kernels.simt_loader import SimtLoader, simt_loader

SIZES = [
    Sizes(width=64, inner=32, experts=8, top_k=2),  # a block without columns
    Sizes(width=160, inner=96, experts=64, top_k=8),
    Sizes(width=544, inner=64, experts=8, top_k=3),  # shares of 2 steps, the last of 1
    Sizes(width=1696, inner=32, experts=4, top_k=1),  # warps without a share, several units each
    Sizes(width=96, inner=256, experts=32, top_k=20),  # more pairs than a warp sorts
    Sizes(width=512, inner=128, experts=32, top_k=8),  # every slot full
]


@pytest.fixture(params=[0, 7], ids=["seed 0", "seed 7"])
def few(request: pytest.FixtureRequest) -> CudaMoe:
    torch.manual_seed(1)
    return CudaMoe(simt_loader(seed=request.param))


@pytest.fixture
def plain() -> CudaMoe:
    return CudaMoe(simt_loader(seed=3), few_rows=0)


def check_workspace(moe: CudaMoe, launches: int) -> None:
    """The next launch finds its half empty, and knows which it is."""
    workspace = moe.few
    assert int(workspace._begun) == launches % 2 * workspace._processors
    assert (workspace._inner[launches % 2] == -1).all()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_are_those_of_two_launches(
    few: CudaMoe, plain: CudaMoe, sizes: Sizes, rows: int
) -> None:
    case = cases.drawn_case(sizes, rows)
    cases.check(few, case)
    cases.check_same_bits(few, plain, case)
    check_workspace(few, launches=2)


@pytest.mark.parametrize("routing", cases.DEVICE_ROUTINGS)
def test_any_routing(few: CudaMoe, plain: CudaMoe, routing: str) -> None:
    case = cases.drawn_case(SIZES[1], 2, routing)
    cases.check_same_bits(few, plain, case)


def test_padding_costs_no_weights(few: CudaMoe) -> None:
    for rows in (1, 2):
        case = cases.drawn_case(SIZES[0], rows, "padding")
        cases.check_padding(few, case)


def test_an_expert_of_no_weight_counts_for_nothing(few: CudaMoe, plain: CudaMoe) -> None:
    """A choice of none among others, and one of weight 0 whose output is no number."""
    case = cases.drawn_case(SIZES[1], 2)
    case.expert[0, 3], case.weight[0, 3] = -1, 0.0
    case.weight[1, 5] = 0.0
    case.experts.down[case.expert[1, 5]] = 0xFF  # scales that are NaN
    cases.check_same_bits(few, plain, case)
    assert not case.run(few)[1].isnan().any()


def test_what_is_no_number_arrives(few: CudaMoe, plain: CudaMoe) -> None:
    """NaN in `inner` is not taken for what has not come yet."""
    case = cases.drawn_case(SIZES[0], 1)
    case.x[0, 5] = float("nan")
    assert case.run(few).isnan().all() and case.run(plain).isnan().all()


def test_launches_take_turns_at_the_workspace(few: CudaMoe, plain: CudaMoe) -> None:
    """Of any sizes behind one another, with other kernels between."""
    drawn = [cases.drawn_case(sizes, rows) for sizes in SIZES[:4] for rows in (2, 1, 3)]
    launches = 0
    for case in drawn:
        cases.check_same_bits(few, plain, case)
        launches += len(case.x) <= 2
        check_workspace(few, launches)


def test_what_does_not_fit_goes_the_other_way(few: CudaMoe) -> None:
    case = cases.drawn_case(Sizes(width=32, inner=288, experts=4, top_k=2), 2)
    cases.check(few, case)
    check_workspace(few, launches=0)
    cases.check(few, case.rows(torch.tensor([1])))
    check_workspace(few, launches=1)


@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1])
def test_few_rows_take_their_own_kernel(rows: int) -> None:
    loader = simt_loader()
    cases.drawn_case(SIZES[0], rows).run(CudaMoe(loader))
    assert isinstance(loader, SimtLoader)
    used = {name for name, _ in loader._kernels}
    assert used == ({"moe_w4a16_few"} if rows == FEW_ROWS else {"moe_w4a16"})
