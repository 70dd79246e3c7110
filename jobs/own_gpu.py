"""Processes of ranks that see one GPU each, as an actor of a gang does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def own_gpu(rank: int) -> Iterator[None]:
    """What is started meanwhile sees one GPU alone: number `rank` of those seen here."""
    seen = os.environ.get(VISIBLE)
    gpus = [str(rank)] * (rank + 1) if seen is None else seen.split(",")
    os.environ[VISIBLE] = gpus[rank] if rank < len(gpus) else ""
    try:
        yield
    finally:
        if seen is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = seen
