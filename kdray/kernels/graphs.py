"""CUDA graphs of what is enqueued again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def record(run: Callable[[], None], pool: Any) -> Callable[[], None]:
    """What replays `run`, which is called twice: once to warm up, once to be recorded.

    pool: torch.cuda.graph_pool_handle(), shared by graphs that never run at once. Other threads may
    use CUDA meanwhile (NCCL's watchdog does), but nothing on the device may be freed.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    replay: Callable[[], None] = graph.replay
    return replay
