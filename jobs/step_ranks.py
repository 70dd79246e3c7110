"""The other ranks of a split model: there, a process each, or looked for in the rank itself."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kdray.errors import RankFailed
from kdray.model.parallel import Collectives, SoloCollectives
from kdray.verifier.collectives import TorchCollectives, open_store

HOST = "127.0.0.1"
MEET_S = 300.0


class Loopback:
    """The collectives of rank 0 of `size` where the others are not: what they would send is what
    it has itself. Sums stay its own part; joins repeat it. Nothing travels, so a step that is timed
    with it lacks what travelling takes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self._size, dim=-1)

    def deal_rows(self, x: Tensor) -> Tensor:
        return x[: len(x) // self._size].repeat(1, self._size)

    def broadcast(self, x: Tensor) -> Tensor:
        return x


def alone(size: int) -> Collectives:
    """Of rank 0 where no other runs."""
    return SoloCollectives() if size == 1 else Loopback(size)


@contextmanager
def ranks_beside(
    size: int, be_rank: Callable[..., None], *args: object
) -> Iterator[Callable[[torch.device], TorchCollectives]]:
    """Processes of ranks 1 and on, be_rank(rank, port, *args) each; gives how rank 0 meets them.

    They end by themselves when their work is done, and are killed where rank 0 fails.
    """
    store, port = open_store(HOST, MEET_S)  # held until all have met
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=be_rank, args=(r, port, *args)) for r in range(1, size)]
    for other in others:
        other.start()
    try:
        yield lambda device: meet(0, size, port, device)
        for other in others:
            other.join(MEET_S)
        failed = [rank for rank, other in enumerate(others, 1) if other.exitcode != 0]
        if failed:
            raise RankFailed(f"ranks {failed} failed; what they said stands above")
    finally:
        for other in others:
            other.kill()
        del store


def meet(rank: int, size: int, port: int, device: torch.device) -> TorchCollectives:
    collectives = TorchCollectives(
        rank=rank, size=size, host=HOST, port=port, device=device, timeout_s=MEET_S
    )
    collectives.prove()
    return collectives
