"""How long a step takes, and what of it which kernels take."""

from __future__ import annotations

import gc
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kdray.kernels.graphs import record
from kdray.profiling.trace import GPU_KINDS, read_trace

NS_PER_MS = 1e6
WARM = 2
BETWEEN = "between"  # no kernel runs
REST = "rest"
# A kernel belongs to the first op whose pattern its name holds.
OPS = (
    ("collectives", r"nccl|all_reduce"),
    ("moe", r"moe_w4a16|moe_sum|sort_rows|grouped"),
    ("attention", r"verify_attention|plan_attention"),
    ("draft_attention", r"draft_attention"),
    ("gemm", r"skinny_gemm|gemm|gemv|nvjet|cutlass|cublas|splitK"),
    ("norm", r"rms_norm"),
    ("rope", r"rope_cache|absorb_query"),
    ("router", r"route_experts"),
    ("swiglu", r"swiglu"),
    ("draw", r"adjust_logits|row_maxima|find_cuts|noise_of_words|draw_tokens|merge_winners"),
    ("topk", r"topk"),
    ("tree", r"build_tree|accept_path|commit_|advance_requests"),
)


class Span(NamedTuple):
    """A kernel, a copy or a fill on the GPU."""

    name: str
    start_ns: int
    end_ns: int


def replayed(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """On a GPU the call captured as a CUDA graph, as the engine captures rounds."""
    if device.type == "cpu":
        call()
        return call
    gc.collect()  # what is freed on the device while a graph is recorded would break it
    return record(lambda: _drop(call()), torch.cuda.graph_pool_handle())


def spans_ms(
    run: Callable[[], object], device: torch.device, repeats: int, warm: int = WARM
) -> list[float]:
    """Milliseconds of each run, after some that warm up: by events on a GPU, else by the clock."""
    for _ in range(warm if device.type == "cuda" else 0):
        run()
    if device.type == "cpu":
        return [_clocked(run) for _ in range(repeats)]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in marks:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in marks]


def profiled(run: Callable[[], object], *, together: bool = False) -> list[Span]:
    """What the GPU does in one run, by torch.profiler; it has run before.

    together: all ranks profile it. Their profilers begin milliseconds apart, and a first sum waits
    for the last of them: it is the second of two runs then.
    """
    torch.cuda.synchronize()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
        torch.inference_mode(),
    ):
        for _ in range(1 + together):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="kdray-trace-") as home:
        path = Path(home) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = read_trace(path, rank=0)
    spans = [Span(s.name, s.start_ns, s.end_ns) for s in trace.slices if s.kind in GPU_KINDS]
    return last_half(spans) if together else spans


def last_half(spans: Sequence[Span]) -> list[Span]:
    """Of two runs, which enqueue the same, the second."""
    return sorted(spans, key=lambda span: (span.start_ns, span.end_ns))[len(spans) // 2 :]


def time_by_op(spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds of every op, in turn of their size, and of the gaps between kernels.

    A moment belongs to the kernel that began first among those that run: one that was launched
    ahead, to fetch weights behind the kernel in front, counts from that one's end. So the parts add
    up to the whole.
    """
    found: dict[str, float] = {}
    ordered = sorted(spans, key=lambda span: (span.start_ns, span.end_ns))
    end = ordered[0].start_ns if ordered else 0
    for span in ordered:
        gap, own = span.start_ns - end, span.end_ns - max(span.start_ns, end)
        if gap > 0:
            found[BETWEEN] = found.get(BETWEEN, 0.0) + gap / NS_PER_MS
        if own > 0:
            op = op_of(span.name)
            found[op] = found.get(op, 0.0) + own / NS_PER_MS
            end = span.end_ns
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def op_of(name: str) -> str:
    return next((op for op, pattern in OPS if re.search(pattern, name, re.IGNORECASE)), REST)


def distinct_experts(chosen: Sequence[Tensor]) -> list[int]:
    """Experts that the rows of a step chose, a layer each."""
    return [len(expert[expert >= 0].unique()) for expert in chosen]


def as_metrics(by_op: dict[str, float]) -> dict[str, float]:
    return {f"{op}_ms": ms for op, ms in by_op.items()}


def _clocked(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def _drop(_: object) -> None:
    """A graph keeps nothing of what its call returned."""
