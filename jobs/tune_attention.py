#!/usr/bin/env python3
"""Find how verify_attention's work is best cut, and write the table of it.

    python jobs/tune_attention.py            # prints the table
    python jobs/tune_attention.py --write    # into kdray/kernels/attention_table.py

For every bucket of (requests, packed rows a request) the costs (attention_table.py: AttentionPlan)
are taken whose worst slowdown over the contexts, against the best for each, is least. Bf16, 8
heads, page 64.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_verify_attention import Inputs, Shape, input_sets, ours_on
from gpu_timing import graph_us, need_gpu

from kdray.kernels import attention_table
from kdray.kernels.attention_table import AttentionPlan
from kdray.kernels.cuda_attention import CudaAttention
from kdray.kernels.loader import KernelLoader

HEADS = 8
REQUESTS, NODES = (1, 4, 8, 16, 64), (1, 9, 17, 33, 65)
CONTEXTS = (128, 1024, 4096, 16384, 65536)
COSTS = tuple(product((90, 140, 200, 300), (0, 150, 300)))  # least cost, small cost
MAX_KEYS = 64 * 4096


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into attention_table.py")
    parser.add_argument("--replays", type=int, default=5)
    arguments = parser.parse_args(argv)
    need_gpu()
    loader = KernelLoader(torch.device("cuda"))
    rows = [
        (requests, nodes * HEADS, *best_costs(loader, requests, nodes, arguments.replays))
        for requests in REQUESTS
        for nodes in NODES
    ]
    text = as_text(rows)
    print(text)
    if arguments.write:
        write(text)
    return 0


def best_costs(loader: KernelLoader, requests: int, nodes: int, replays: int) -> tuple[int, int]:
    contexts = [context for context in CONTEXTS if requests * context <= MAX_KEYS]
    tables = [times(loader, Shape(requests, c, nodes, HEADS), replays) for c in contexts]
    worst = {cost: max(table[cost] / min(table.values()) for table in tables) for cost in COSTS}
    best = min(worst, key=lambda cost: worst[cost])
    for context, table in zip(contexts, tables, strict=True):
        cells = "  ".join(f"{cost}: {us:.1f}" for cost, us in table.items())
        print(f"requests {requests}  nodes {nodes}  context {context}  us by cost  {cells}")
    print(f"requests {requests}  nodes {nodes}  costs {best}, slowdown {worst[best]:.3f}")
    return best


def times(loader: KernelLoader, shape: Shape, replays: int) -> dict[tuple[int, int], float]:
    sets = input_sets(shape)
    return {cost: time_of(loader, sets, cost, replays) for cost in COSTS}


def time_of(
    loader: KernelLoader, sets: Sequence[Inputs], costs: tuple[int, int], replays: int
) -> float:
    processors = torch.cuda.get_device_properties(loader.device).multi_processor_count
    attention = CudaAttention(loader, plan=AttentionPlan(processors, *costs))
    calls = [ours_on(attention, inputs) for inputs in sets]
    return statistics.median(graph_us(calls, replays=replays, at_least=6))


def as_text(rows: Sequence[tuple[int, int, int, int]]) -> str:
    lines = "".join(f"    {row},\n" for row in rows)
    return f"ROWS: tuple[tuple[int, int, int, int], ...] = (\n{lines})\n"


def write(text: str) -> None:
    path = Path(attention_table.__file__)
    old = path.read_text()
    new, found = re.subn(r"ROWS: tuple.*? = \(.*?\n?\)\n", lambda _: text, old, flags=re.DOTALL)
    if found != 1:
        raise SystemExit(f"no table of rows in {path}")
    path.write_text(new)


if __name__ == "__main__":
    sys.exit(main())
