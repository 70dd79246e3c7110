"""Whether the ranks' data arrives, and arrives right: asked once, before a model is loaded.

On PCIe hosts whose IOMMU or ACS is in the way, direct transfers between GPUs hang or bring wrong
numbers. Both are found here, in seconds, and not as a model that talks nonsense.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kdray.errors import LinkError
from kdray.model.parallel import Collectives, Shard

# NCCL's own variable: set, no rank reaches into another's memory, NCCL or we.
P2P_OFF = "NCCL_P2P_DISABLE"
LINK_TIMEOUT_S = 30.0
SIZES = (64, 1 << 16, 1 << 20)  # numbers a rank sends to each: other sizes take other ways
_PRIME = 8191  # numbers stay exact in float32, sums over many ranks too
_POLL_S = 0.005


def reaches_peers() -> bool:
    """Whether ranks may read one another's memory: not after it was found not to work, nor where
    whoever runs this says so."""
    return os.environ.get(P2P_OFF, "0") == "0"


def check_links(
    collectives: Collectives,
    shard: Shard,
    device: torch.device,
    timeout_s: float = LINK_TIMEOUT_S,
) -> None:
    """Every rank sends every rank numbers of its own, by each of the calls that steps make.

    All ranks call it together. Raises LinkError with the ranks whose numbers came wrong, or after
    timeout_s where nothing came.
    """
    if shard.size == 1:
        return
    for size in SIZES:
        _check_pairs(collectives, shard, device, size, timeout_s)
        _check_sum(collectives, shard, device, size, timeout_s)
        _check_broadcast(collectives, shard, device, size, timeout_s)


def _check_pairs(
    collectives: Collectives, shard: Shard, device: torch.device, size: int, timeout_s: float
) -> None:
    ranks = range(shard.size)
    mine = torch.stack([_numbers(shard.rank, to, size, device) for to in ranks])
    got = _within(timeout_s, device, shard, lambda: collectives.deal_rows(mine))
    parts = got.view(shard.size, size)
    wrong = [
        source
        for source in ranks
        if not torch.equal(parts[source], _numbers(source, shard.rank, size, device))
    ]
    if wrong:
        raise LinkError(
            f"rank {shard.rank} got wrong numbers ({size} at a time) from rank "
            f"{', '.join(map(str, wrong))}"
        )


def _check_sum(
    collectives: Collectives, shard: Shard, device: torch.device, size: int, timeout_s: float
) -> None:
    mine = _numbers(shard.rank, 0, size, device)
    wanted = torch.stack([_numbers(rank, 0, size, device) for rank in range(shard.size)]).sum(0)
    if not torch.equal(
        _within(timeout_s, device, shard, lambda: collectives.all_reduce(mine)), wanted
    ):
        raise LinkError(f"rank {shard.rank} got a wrong sum of {size} numbers over all ranks")


def _check_broadcast(
    collectives: Collectives, shard: Shard, device: torch.device, size: int, timeout_s: float
) -> None:
    wanted = _numbers(0, 1, size, device)
    mine = wanted.clone() if shard.rank == 0 else torch.zeros_like(wanted)
    if not torch.equal(
        _within(timeout_s, device, shard, lambda: collectives.broadcast(mine)), wanted
    ):
        raise LinkError(f"rank {shard.rank} got {size} wrong numbers broadcast by rank 0")


def _numbers(source: int, to: int, size: int, device: torch.device) -> Tensor:
    """[size] float32, other ones for every pair of ranks."""
    place = torch.arange(size, device=device)
    return ((place * 31 + source * 977 + to * 131 + 1) % _PRIME).float()


def _within(
    timeout_s: float, device: torch.device, shard: Shard, call: Callable[[], Tensor]
) -> Tensor:
    """The call's result once the device has it; a GPU that waits for others is not waited for."""
    start = time.monotonic()
    result = call()
    if device.type != "cuda":
        return result
    done = torch.cuda.Event()
    done.record()
    while not done.query():
        if time.monotonic() - start > timeout_s:
            raise LinkError(
                f"rank {shard.rank} of {shard.size} waits for the other ranks' numbers since "
                f"{timeout_s:g} s"
            )
        time.sleep(_POLL_S)
    return result
