"""CUDA graphs of what is enqueued again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def shared_pool(device: torch.device) -> Any:
    """For the arrays of all graphs of an engine, which never run at once; None on a CPU."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def record(run: Callable[[], None], pool: Any) -> Callable[[], None]:
    """What replays `run`, which is called twice: once to warm up, once to be recorded.

    pool: of shared_pool, for graphs that never run at once. Other threads may
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
