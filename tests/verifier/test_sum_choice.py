"""Which sums go which way, and that it shows nowhere; without GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.cuda_fused import CudaFused
from kdray.kernels.cuda_reduce import OneShotReduce, SharedRegions
from kdray.kernels.ops import Norm, load_ops
from kdray.model.layers import RmsNorm
from kdray.model.parallel import Collectives, Shard, SoloCollectives
from kdray.verifier import short_sums
from kdray.verifier.collectives import TorchCollectives, open_store
from kdray.verifier.short_sums import NORM_ROWS, NORM_WIDTH, SIZES, ShortSums
from kdray.verifier.sum_times import Way, first_wins
from tests.kernels.simt_loader import simt_loader
from tests.kernels.simt_ranks import on_ranks

CPU = torch.device("cpu")
OPS = load_ops("cpu")
HOST = "127.0.0.1"


class OneRank:
    """Stands in for OneShotReduce where there are no others; writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def takes(self, x: Tensor) -> bool:
        return True

    def all_reduce(self, x: Tensor) -> Tensor:
        self.asked.append("sum")
        return x

    def takes_norm(self, part: Tensor, x: Tensor, norm: Norm) -> bool:
        return part.shape == x.shape

    def all_reduce_norm(self, part: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        self.asked.append("sum and norm")
        return OPS.add_rms_norm(x, part, norm)


def short(reduce: object, *, limit: int, norm_rows: int) -> ShortSums:
    return ShortSums(
        reduce=cast(OneShotReduce, reduce),
        regions=cast(SharedRegions, None),
        limit_bytes=limit,
        norm_rows=norm_rows,
    )


def norm_of(width: int) -> RmsNorm:
    return RmsNorm.of(torch.linspace(0.5, 1.5, width), 1e-6)


@pytest.fixture
def alone() -> Iterator[TorchCollectives]:
    """A group of one over gloo."""
    store, port = open_store(HOST, 60.0)
    found = TorchCollectives(rank=0, size=1, host=HOST, port=port, device=CPU, timeout_s=60.0)
    yield found
    found._short = None
    found.close()
    del store


def equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_sum_and_its_norm_are_two_calls_where_nobody_knows_a_shorter_way() -> None:
    class Doubled(SoloCollectives):
        def all_reduce(self, x: Tensor) -> Tensor:
            return x * 2

    x, part, norm = torch.randn(3, 8), torch.randn(3, 8), norm_of(8)
    found = SoloCollectives().all_reduce_norm(part, x, norm, OPS)
    assert equal(found, OPS.add_rms_norm(x, part, norm))
    found = Doubled().all_reduce_norm(part, x, norm, OPS)
    assert equal(found, OPS.add_rms_norm(x, part * 2, norm))


@pytest.mark.parametrize(
    ("limit", "norm_rows", "rows", "asked"),
    [
        (1 << 20, 4, 4, ["sum and norm"]),
        (1 << 20, 4, 5, ["sum"]),
        (0, 4, 4, ["sum and norm"]),
        (0, 4, 5, []),
        (1 << 20, 0, 1, ["sum"]),
    ],
)
def test_few_rows_are_summed_and_normed_at_once(
    alone: TorchCollectives, limit: int, norm_rows: int, rows: int, asked: list[str]
) -> None:
    reduce = OneRank()
    alone._short = short(reduce, limit=limit, norm_rows=norm_rows)
    x, part, norm = torch.randn(rows, 16), torch.randn(rows, 16), norm_of(16)
    found = alone.all_reduce_norm(part.clone(), x, norm, OPS)
    assert reduce.asked == asked
    assert equal(found, OPS.add_rms_norm(x, part, norm))


def test_rows_wider_than_were_measured_take_two_launches() -> None:
    sums, norm = short(OneRank(), limit=0, norm_rows=2), norm_of(8)
    for width, takes in ((NORM_WIDTH, True), (NORM_WIDTH + 8, False)):
        x = torch.zeros(1, width, dtype=torch.bfloat16)
        assert sums.takes_norm(x, x, norm) is takes
    assert not sums.takes_norm(torch.zeros(1, NORM_WIDTH), torch.zeros(1, NORM_WIDTH), norm)
    assert not sums.takes_norm(torch.zeros(1, 8), torch.zeros(2, 8), norm)


@pytest.mark.parametrize(
    ("times", "wins"),
    [
        ([[1.0, 2.0], [2.0, 3.0]], 2),
        ([[1.0, 2.0], [3.0, 3.0], [1.0, 2.0]], 1),
        ([[1.0, 2.0, 0.5], [1.0, 2.0, 3.0]], 0),
        ([], 0),
    ],
)
def test_a_way_is_taken_up_to_where_another_is_as_fast(times: list[list[float]], wins: int) -> None:
    assert first_wins(times) == wins


@pytest.mark.parametrize(
    ("faster", "most"), [(0, 0), (2, NORM_ROWS[1]), (len(NORM_ROWS), NORM_ROWS[-1])]
)
def test_the_norm_is_taken_along_up_to_the_rows_that_were_measured(
    monkeypatch: pytest.MonkeyPatch, faster: int, most: int
) -> None:
    def told(
        ways: Sequence[Way], messages: Sequence[Tensor], collectives: Collectives
    ) -> list[list[float]]:
        assert [len(x) for x in messages] == list(NORM_ROWS)
        for way in ways:
            way(messages[0])
        return [[5.0 if i < faster else 9.0, 8.0, 7.0] for i in range(len(messages))]

    monkeypatch.setattr(short_sums, "times_us", told)
    reduce = OneRank()
    fused = CudaFused(simt_loader())
    norms = short_sums._Norms(cast(OneShotReduce, reduce), fused)
    assert short_sums._norm_rows(norms, SoloCollectives(), Shard()) == most
    assert reduce.asked == ["sum and norm", "sum"]


def test_sums_alone_are_taken_up_to_the_bytes_that_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(*_: object) -> list[list[float]]:
        return [[5.0, 6.0]] * 3 + [[6.0, 5.0]] * 4

    monkeypatch.setattr(short_sums, "times_us", told)
    reduce = cast(OneShotReduce, OneRank())
    assert short_sums._limit(reduce, SoloCollectives(), Shard(), CPU) == SIZES[2]


class OtherBits(OneShotReduce):
    def all_reduce_norm(self, part: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        total, normed = super().all_reduce_norm(part, x, norm)
        normed[0, 1] *= 1 + 2.0**-6
        return total, normed


@pytest.mark.parametrize("sound", [True, False])
def test_the_kernel_is_held_to_the_bits_of_two_launches(
    monkeypatch: pytest.MonkeyPatch, sound: bool
) -> None:
    monkeypatch.setattr(short_sums, "NORM_WIDTH", 264)

    def be_rank(rank: int, reduce: OneShotReduce) -> BaseException | None:
        if not sound:
            reduce.__class__ = OtherBits
        norms = short_sums._Norms(reduce, CudaFused(reduce._loader))
        try:
            for rows in (1, 2):
                norms.check(Shard(rank, 2), rows)
        except KernelError as error:
            return error
        return None

    found = on_ranks(2, 1 << 16, be_rank)
    if sound:
        assert found == [None, None]
    else:
        assert all("all_reduce_norm is wrong on rank" in str(error) for error in found)
