"""all_reduce_norm.cu's own source on the CPU: beside the two kernels whose bits it has, and on
ranks that run at once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.cuda_fused import CudaFused
from kdray.kernels.cuda_reduce import MAX_NORM_ROWS, OneShotReduce, grid
from tests.kernels.fused_cases import SomeNorm, some_norm
from tests.kernels.simt_loader import simt_loader
from tests.kernels.simt_ranks import Ranks, on_ranks

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
ROOM = 1 << 18
WIDTH = 264  # of the ranks that run at once: two warps, one of them half empty


@pytest.fixture(scope="module")
def fused() -> CudaFused:
    return CudaFused(simt_loader(seed=3))


def rows_of(seed: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype)


def summed(parts: Sequence[Tensor]) -> Tensor:
    """In float32 in the ranks' order, rounded once."""
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "rank", "rows", "width"),
    [
        (2, 0, 1, 7168),
        (2, 1, 8, 24),
        (3, 1, 3, 2056),
        (8, 7, 2, 1536),
        (8, 0, MAX_NORM_ROWS, 8),
        (2, 1, 33, 264),
    ],
)
def test_the_bits_are_those_of_both_kernels(
    fused: CudaFused, size: int, rank: int, rows: int, width: int, dtype: torch.dtype
) -> None:
    ranks, apart = (Ranks(size, rank, ROOM) for _ in range(2))
    norm = some_norm(width, dtype, CPU)
    for launch in (1, 2, 3):
        parts = [rows_of(9 * launch + r, rows, width, dtype) for r in range(size)]
        x = rows_of(launch, rows, width, dtype)
        kept = parts[rank].clone(), x.clone()
        ranks.arrive(launch, parts, rows)
        total, normed = ranks.reduce.all_reduce_norm(parts[rank], x, norm)
        assert torch.equal(parts[rank], kept[0]) and torch.equal(x, kept[1])
        assert torch.equal(ranks.buffer(rank, launch, x), parts[rank].flatten())

        apart.arrive(launch, parts)
        both = fused.add_rms_norm(x, apart.reduce.all_reduce(parts[rank].clone()), norm)
        assert torch.equal(total, both[0]) and torch.equal(normed, both[1])
        assert torch.equal(total, x + summed(parts))


def test_blocks_that_a_launch_does_without_are_counted(fused: CudaFused) -> None:
    """Behind it a launch of more blocks finds all of them at the same count."""
    ranks, norm = Ranks(2, 1, ROOM), some_norm(24, torch.bfloat16, CPU)
    for launch, rows in enumerate([1, 0, 3, 1, 0, 5], 1):  # 0: a plain sum
        parts = [rows_of(launch + 7 * r, rows or 100, 24, torch.bfloat16) for r in range(2)]
        blocks = rows or grid(300)
        ranks.arrive(launch, parts, blocks)
        if rows:
            x = rows_of(launch, rows, 24, torch.bfloat16)
            total, _ = ranks.reduce.all_reduce_norm(parts[1], x, norm)
            assert torch.equal(total, x + summed(parts))
        else:
            assert torch.equal(ranks.reduce.all_reduce(parts[1].clone()), summed(parts))
        told = ranks.flags(0)[1]
        assert (told[:blocks] == launch).all() and (told[blocks:] < launch).all()


def test_counts_wrap_and_old_flags_are_not_taken_for_new_ones() -> None:
    """Block 1 of the other rank last told of a launch 2^31 + 5 ago, which is no later one; it comes
    while this rank waits, as block 0 did before."""
    size, launch = 2, 2**31 + 6

    def be_rank(rank: int, reduce: OneShotReduce) -> list[Tensor]:
        reduce._sequence.fill_(launch - 1 - 2**32)
        outputs = []
        for turn in range(4):
            part, x = (rows_of(10 * turn + n, 2, WIDTH, torch.float32) for n in (rank, 5))
            outputs.append(reduce.all_reduce_norm(part, x, some_norm(WIDTH, x.dtype, CPU))[0])
        return outputs

    found = on_ranks(size, ROOM, be_rank)
    for turn in range(4):
        parts = [rows_of(10 * turn + rank, 2, WIDTH, torch.float32) for rank in range(size)]
        wanted = rows_of(10 * turn + 5, 2, WIDTH, torch.float32) + summed(parts)
        assert all(torch.equal(outputs[turn], wanted) for outputs in found)


def plan(launches: int, seed: int) -> list[tuple[str, int]]:
    """(norm or plain, rows) of every launch, in a row of any order."""
    draw = random.Random(seed)
    kinds = [draw.choice(("norm", "norm", "plain")) for _ in range(launches)]
    return [(kind, draw.randint(1, 6 if kind == "norm" else 40)) for kind in kinds]


@pytest.mark.parametrize(("size", "launches"), [(2, 60), (4, 20)])
def test_ranks_that_run_at_once_sum_every_launch_right(size: int, launches: int) -> None:
    norm = some_norm(WIDTH, torch.bfloat16, CPU)

    def part_of(launch: int, rank: int, rows: int) -> Tensor:
        return rows_of(100 * launch + rank, rows, WIDTH, torch.bfloat16)

    def be_rank(rank: int, reduce: OneShotReduce) -> list[tuple[Tensor, ...]]:
        outputs: list[tuple[Tensor, ...]] = []
        for launch, (kind, rows) in enumerate(plan(launches, seed=size)):
            part = part_of(launch, rank, rows)
            if kind == "norm":
                outputs.append(reduce.all_reduce_norm(part, part_of(launch, 50, rows), norm))
            else:
                outputs.append((reduce.all_reduce(part),))
        return outputs

    found = on_ranks(size, ROOM, be_rank)
    for launch, (kind, rows) in enumerate(plan(launches, seed=size)):
        wanted = summed([part_of(launch, rank, rows) for rank in range(size)])
        if kind == "norm":
            wanted = part_of(launch, 50, rows) + wanted
        for outputs in found:
            assert torch.equal(outputs[launch][0], wanted), (launch, kind, rows)
            assert torch.equal(outputs[launch][-1], found[0][launch][-1])


@pytest.mark.parametrize(
    ("part", "x"),
    [
        (torch.zeros(MAX_NORM_ROWS + 1, 8), torch.zeros(MAX_NORM_ROWS + 1, 8)),
        (torch.zeros(1, 6), torch.zeros(1, 6)),
        (torch.zeros(1, 8), torch.zeros(2, 8)),
        (torch.zeros(1, 8), torch.zeros(1, 8).bfloat16()),
        (torch.zeros(2, 8), torch.zeros(2, 16)[:, :8]),
        (torch.zeros(1, 8200), torch.zeros(1, 8200)),
        (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8)),
        (torch.zeros(8, 8192), torch.zeros(8, 8192)),
    ],
    ids=["rows", "half a vector", "shapes", "dtypes", "strided", "too wide", "not rows", "room"],
)
def test_what_it_does_not_take_is_refused(part: Tensor, x: Tensor) -> None:
    norm = SomeNorm(torch.ones(x.shape[-1], dtype=x.dtype), torch.tensor(1e-6))
    with pytest.raises(KernelError, match="all_reduce_norm takes no"):
        Ranks(2, 0).reduce.all_reduce_norm(part, x, norm)
