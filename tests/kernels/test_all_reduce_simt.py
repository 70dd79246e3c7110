"""all_reduce.cu's own source on the CPU: one rank's launches, the others' part laid out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.cuda_reduce import BLOCKS, THREADS, VECTOR_BYTES, grid
from tests.kernels.simt_ranks import Ranks

CAPACITY = 5 << 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 1), (8, 7)])
@pytest.mark.parametrize("numbers", [8, 264, 1024, 5000])
def test_every_rank_s_numbers_are_summed_in_their_order(
    size: int, rank: int, numbers: int, dtype: torch.dtype
) -> None:
    ranks = Ranks(size, rank, CAPACITY)
    blocks = grid(numbers * dtype.itemsize // VECTOR_BYTES)
    generator = torch.Generator().manual_seed(size)
    for launch in (1, 2, 3):
        parts = [torch.randn(numbers, generator=generator).to(dtype) for _ in range(size)]
        wanted = torch.zeros(numbers)
        for part in parts:
            wanted += part.float()
        ranks.arrive(launch, parts)
        mine = parts[rank].clone()
        assert ranks.reduce.all_reduce(mine) is mine
        assert torch.equal(mine, wanted.to(dtype))
        assert torch.equal(ranks.buffer(rank, launch, mine), parts[rank])
        for other in range(size):
            told = ranks.flags(other)[rank]
            assert (told[:blocks] == launch).all() and not told[blocks:].any()


def test_a_launch_has_as_many_blocks_as_its_message_wants() -> None:
    assert [grid(vectors) for vectors in (1, THREADS, THREADS + 1)] == [1, 1, 2]
    assert grid(THREADS * BLOCKS) == grid(1 << 30) == BLOCKS


def test_what_is_no_number_stays_so() -> None:
    ranks = Ranks(2, 0)
    parts = [torch.zeros(8, dtype=torch.bfloat16) for _ in range(2)]
    parts[1][3] = torch.nan
    parts[1][4] = torch.inf
    ranks.arrive(1, parts)
    mine = ranks.reduce.all_reduce(parts[0].clone())
    assert mine[3].isnan() and mine[4].isinf() and mine.isfinite().sum() == 6


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(CAPACITY, dtype=torch.bfloat16),
        torch.zeros(7, dtype=torch.bfloat16),
        torch.zeros(8, dtype=torch.float16),
        torch.zeros(8, 8)[:, ::2],
    ],
    ids=["too long", "half a vector", "float16", "strided"],
)
def test_what_it_does_not_take_is_refused(x: Tensor) -> None:
    with pytest.raises(KernelError, match="16 bytes"):
        Ranks(2, 0, CAPACITY).reduce.all_reduce(x)
