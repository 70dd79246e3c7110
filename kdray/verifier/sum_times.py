"""How long ways to sum over the ranks take on this host: measured by all, by rank 0's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kdray.kernels.graphs import record
from kdray.model.parallel import Collectives

Way = Callable[[Tensor], object]  # to sum a message, which it may overwrite

_CALLS, _REPLAYS = 20, 5


def times_us(
    ways: Sequence[Way], messages: Sequence[Tensor], collectives: Collectives
) -> list[list[float]]:
    """Of each message each way's microseconds, the same figures on all ranks, which call it
    together."""
    times = [[_us(way, message) for way in ways] for message in messages]
    told: list[list[float]] = collectives.broadcast(
        torch.tensor(times, device=messages[0].device)
    ).tolist()
    return told


def first_wins(times: Sequence[Sequence[float]]) -> int:
    """For how many messages, counted up to the first for which it is not, the first way is the
    fastest."""
    for count, (first, *others) in enumerate(times):
        if first >= min(others):
            return count
    return len(times)


def _us(way: Way, message: Tensor) -> float:
    """Of one call in a CUDA graph, and of a small kernel in front that writes the message, as in a
    step: NCCL calls right behind one another take twice as long as such ones (17 us for 9)."""

    def run() -> None:
        for _ in range(_CALLS):
            message.fill_(0)
            way(message)

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
