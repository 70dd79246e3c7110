"""Sums of short messages by ranks that read one another's memory, where that is faster than NCCL.

Decided by a measurement when the ranks have met, and by all alike: rank 0's word counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.errors import KernelError, LinkError
from kdray.kernels.cuda_reduce import MAX_RANKS, OneShotReduce, SharedRegions
from kdray.kernels.graphs import record
from kdray.kernels.loader import KernelLoader
from kdray.model.parallel import Collectives, Shard
from kdray.verifier.links import reaches_peers

CAPACITY_BYTES = 1 << 20
SIZES = tuple(1 << power for power in range(14, 21))  # bytes: from one row of Kimi's to 73
_CALLS, _REPLAYS = 20, 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ShortSums:
    """reduce   for messages of at most limit_bytes; regions must outlive it"""

    reduce: OneShotReduce
    regions: SharedRegions
    limit_bytes: int

    def takes(self, x: Tensor) -> bool:
        return x.numel() * x.itemsize <= self.limit_bytes and self.reduce.takes(x)


def open_short_sums(
    collectives: Collectives, shard: Shard, device: torch.device
) -> ShortSums | None:
    """None where the ranks cannot or may not read one another's memory, or NCCL is faster at every
    size.

    All ranks call it together. Raises LinkError where sums come wrong.
    """
    if not 1 < shard.size <= MAX_RANKS or not reaches_peers():
        return None
    regions = open_regions(collectives, shard, device, CAPACITY_BYTES)
    if regions is None:
        return None
    reduce = OneShotReduce(KernelLoader(device), regions.addresses, shard.rank, CAPACITY_BYTES)
    for size in (SIZES[0], SIZES[-1]):
        _check(reduce, shard, device, size)
    limit = _limit(reduce.all_reduce, collectives, shard, device)
    if limit == 0:
        regions.close()
        return None
    return ShortSums(reduce, regions, limit)


def open_regions(
    collectives: Collectives, shard: Shard, device: torch.device, capacity_bytes: int
) -> SharedRegions | None:
    """Every rank's memory for OneShotReduce; None on all where one cannot open another's."""

    def gather(handle: Tensor) -> Tensor:
        joined = collectives.all_gather(handle.int().to(device))
        return joined.view(shard.size, -1).to(torch.uint8).cpu()

    regions: SharedRegions | None = None
    try:
        regions = SharedRegions(shard.rank, capacity_bytes, gather)
    except KernelError as error:
        _log.info("sums by NCCL alone: %s", error)
    failed = torch.tensor([float(regions is None)], device=device)
    if float(collectives.all_reduce(failed)) == 0:
        return regions
    if regions is not None:
        regions.close()
    return None


def _check(reduce: OneShotReduce, shard: Shard, device: torch.device, size: int) -> None:
    place = torch.arange(size // 4, device=device) % 509
    for turn in range(4):
        got = reduce.all_reduce((place * (shard.rank + turn + 1)).float())
        factor = sum(rank + turn + 1 for rank in range(shard.size))
        if not torch.equal(got, (place * factor).float()):
            raise LinkError(f"rank {shard.rank} got a wrong sum over the GPUs' shared memory")


def _limit(
    short: Callable[[Tensor], Tensor],
    collectives: Collectives,
    shard: Shard,
    device: torch.device,
) -> int:
    """The most bytes up to which short sums are faster at every size, by rank 0's clock."""
    times = [
        [_us(call, size, device) for call in (short, collectives.all_reduce)] for size in SIZES
    ]
    told = collectives.broadcast(torch.tensor(times, device=device)).tolist()
    limit = 0
    for size, (one_shot, nccl) in zip(SIZES, told, strict=True):
        if one_shot >= nccl:
            break
        limit = size
    if shard.rank == 0:
        figures = ", ".join(
            f"{size >> 10} KB {one_shot:.1f} against {nccl:.1f}"
            for size, (one_shot, nccl) in zip(SIZES, told, strict=True)
        )
        _log.info(
            "sums over the GPUs' memory up to %d KB; us with a kernel in front, NCCL's: %s",
            limit >> 10,
            figures,
        )
    return limit


def _us(call: Callable[[Tensor], Tensor], size: int, device: torch.device) -> float:
    """Of one call in a CUDA graph, and of a small kernel in front that writes the message, as in a
    step: NCCL calls right behind one another take twice as long as such ones (17 us for 9)."""
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)

    def run() -> None:
        for _ in range(_CALLS):
            x.fill_(0)
            call(x)

    replay = record(run, torch.cuda.graph_pool_handle())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    start.record()
    for _ in range(_REPLAYS):
        replay()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds * 1e3 / (_CALLS * _REPLAYS)
