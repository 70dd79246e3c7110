"""The other ranks of a split model: there, a process each, or looked for in the rank itself."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess

import torch
from own_gpu import own_gpu
from torch import Tensor

from kdray.config import EngineConfig
from kdray.errors import RankFailed
from kdray.model.parallel import Collectives, SoloCollectives
from kdray.verifier.collectives import TorchCollectives, open_store

HOST = "127.0.0.1"
MEET_S = 300.0


class Loopback(Collectives):
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
def ranks_beside(size: int, be_rank: Callable[..., object], *args: object) -> Iterator[int]:
    """Processes of ranks 1 and on, be_rank(rank, port, *args) each; gives the port to meet at.

    Each sees GPU number `rank` alone; rank 0 is this process, and takes the first.

    They end by themselves when their work is done, and are killed where rank 0 fails. Where one of
    them fails the whole job ends: rank 0 may stand in a kernel that waits for it without limit.
    """
    store, port = open_store(HOST, MEET_S)  # held until all have met
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=be_rank, args=(r, port, *args)) for r in range(1, size)]
    for rank, other in enumerate(others, 1):
        with own_gpu(rank):
            other.start()
    over = threading.Event()
    watcher = threading.Thread(target=_end_with_any, args=(others, over), daemon=True)
    watcher.start()
    try:
        yield port
        watcher.join(MEET_S)
        if watcher.is_alive():
            raise RankFailed(f"not all ranks have ended {MEET_S:g} s after rank 0")
    finally:
        over.set()
        for other in others:
            other.kill()
        del store


def _end_with_any(others: Sequence[SpawnProcess], over: threading.Event) -> None:
    """Waits for all; ends this process as soon as one has failed, unless all is over by then."""
    left = {other.sentinel: other for other in others}
    while left:
        for ended in wait(list(left)):
            other = left.pop(ended)
            other.join()
            if over.is_set():
                return
            if other.exitcode != 0:
                rank = others.index(other) + 1
                print(f"error: rank {rank} failed; what it said stands above", file=sys.stderr)
                for beside in left.values():
                    beside.kill()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)


def join(rank: int, size: int, port: int, device: torch.device) -> TorchCollectives:
    """Sums by NCCL (gloo on CPUs) alone."""
    return TorchCollectives(
        rank=rank, size=size, host=HOST, port=port, device=device, timeout_s=MEET_S
    )


def meet(
    rank: int, size: int, port: int, config: EngineConfig, device: torch.device
) -> TorchCollectives:
    """As a gang meets: links proved, short sums by what was found to be faster."""
    collectives = join(rank, size, port, device)
    collectives.prove(in_rank_order=config.batch_invariant)
    return collectives
