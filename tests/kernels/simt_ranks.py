"""Regions of several ranks in this process, for the kernels that read them, run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from kdray.kernels.cuda_reduce import BLOCKS, FLAG_BYTES, MAX_RANKS, OneShotReduce, region_bytes
from tests.kernels.simt_loader import simt_loader

T = TypeVar("T")


def some_regions(size: int, capacity: int) -> list[Tensor]:
    return [torch.zeros(region_bytes(capacity), dtype=torch.uint8) for _ in range(size)]


class Ranks:
    """`rank` under test, its launches one at a time; what the others write is laid out before."""

    def __init__(self, size: int, rank: int, capacity: int = 1 << 12) -> None:
        self.regions = some_regions(size, capacity)
        self.rank = rank
        self._capacity = capacity
        addresses = [region.data_ptr() for region in self.regions]
        self.reduce = OneShotReduce(simt_loader(), addresses, rank, capacity)

    def flags(self, rank: int) -> Tensor:
        """[MAX_RANKS, BLOCKS]: what rank has been told, by whom."""
        return self.regions[rank][:FLAG_BYTES].view(torch.int32).view(MAX_RANKS, BLOCKS)

    def buffer(self, rank: int, launch: int, x: Tensor) -> Tensor:
        start = FLAG_BYTES + launch % 2 * self._capacity
        size = x.numel() * x.itemsize
        return self.regions[rank][start : start + size].view(x.dtype)

    def arrive(self, launch: int, parts: Sequence[Tensor], blocks: int = BLOCKS) -> None:
        """What the other ranks write before and while the rank under test waits."""
        for other, part in enumerate(parts):
            if other != self.rank:
                self.buffer(other, launch, part).copy_(part.flatten())
                self.flags(self.rank)[other, :blocks] = launch


def on_ranks(size: int, capacity: int, be_rank: Callable[[int, OneShotReduce], T]) -> list[T]:
    """be_rank(rank, reduce) on a thread each, whose launches run at the same time and wait for one
    another."""
    regions = some_regions(size, capacity)
    addresses = [region.data_ptr() for region in regions]

    def run(rank: int) -> T:
        loader = simt_loader(seed=rank, apart=True)
        return be_rank(rank, OneShotReduce(loader, addresses, rank, capacity))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
