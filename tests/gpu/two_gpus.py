"""Two processes, a GPU each, that meet through one store."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from jobs.own_gpu import own_gpu
from kdray.verifier.collectives import open_store

HOST = "127.0.0.1"
WAIT_S = 180.0


def run_both(be_rank: Callable[..., None], *args: object) -> list[Any]:
    """be_rank(rank, port, *args, said) in two processes, which must end well; what they said.

    said: a queue; a rank puts a few kilobytes into it at most.
    """
    context = multiprocessing.get_context("spawn")
    store, port = open_store(HOST, WAIT_S)  # held until both have met
    said = context.SimpleQueue()
    ranks = [context.Process(target=be_rank, args=(rank, port, *args, said)) for rank in range(2)]
    for number, rank in enumerate(ranks):
        with own_gpu(number):
            rank.start()
    for rank in ranks:
        rank.join(WAIT_S)
    ends = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    del store
    assert ends == [0, 0]
    heard = []
    while not said.empty():
        heard.append(said.get())
    return heard
