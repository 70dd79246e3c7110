"""How long a GPU call takes: inside a CUDA graph, and issued one after another from Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def need_gpu() -> None:
    """Ends the job with a word where there is nothing to time."""
    if not torch.cuda.is_available():
        raise SystemExit("this job times a GPU, and torch sees none here")


def graph_us(calls: Sequence[Call], *, replays: int = 40, at_least: int = 50) -> list[float]:
    """Microseconds a call inside a graph, one sample a replay.

    calls   the same work on different inputs; they are repeated to `at_least` nodes a graph
    """
    rounds = -(-at_least // len(calls))
    nodes = list(calls) * rounds
    graph = capture(lambda: [call() for call in nodes])
    return [us / len(nodes) for us in _spans(graph.replay, replays)]


def stream_us(calls: Sequence[Call], *, repeats: int = 20, at_least: int = 100) -> list[float]:
    """Microseconds a call issued from Python without waiting: host or device, what is slower."""
    nodes = list(calls) * -(-at_least // len(calls))

    def run() -> None:
        for call in nodes:
            call()

    return [us / len(nodes) for us in _spans(run, repeats)]


def host_us(call: Call, *, repeats: int = 10) -> list[float]:
    """Microseconds until the call's work is done, by the host's clock."""
    call()
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples


def copy_bytes_per_us(size: int = 1 << 30) -> float:
    """Bytes read and written a microsecond by a large copy on the device: the floor's speed."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    spans = sorted(_spans(lambda: target.copy_(source), 20))
    return 2 * size / spans[len(spans) // 2]


def capture(work: Call) -> torch.cuda.CUDAGraph:
    """A graph of what `work` enqueues; run once before, so that everything is loaded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _spans(run: Call, repeats: int) -> list[float]:
    """Microseconds of each run by device events, after three that warm up."""
    for _ in range(3):
        run()
    spans = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        spans.append(start.elapsed_time(stop) * 1e3)
    return spans
