#!/usr/bin/env python3
"""Microseconds to move accepted KV rows of all layers, in one launch and layer by layer.

    python jobs/bench_commit.py --out benchmarks/results

graph_us   commit_paths: paths, lengths and page tables read on the device, in a CUDA graph
list_us    commit_kv: the same rows from lists of slots, in a CUDA graph
stream_us  commit_paths issued from Python
torch_us   cache[target] = cache[source], layer after layer, in a CUDA graph
floor_us   bytes read and written once, at the speed of a large copy measured in this run

Every call has its own rows; together they exceed the L2, so that rows come from memory. The moved
caches are compared with the reference first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_timing import copy_bytes_per_us, graph_us, need_gpu, stream_us
from record import Record
from torch import Tensor

from kdray.core.plan import AcceptedPaths
from kdray.kernels.cuda_commit import (
    CacheTable,
    PathBlock,
    SlotState,
    commit_kv,
    commit_paths,
    row_bytes,
)
from kdray.kernels.loader import KernelLoader
from kdray.kernels.reference import ReferenceOps

SLOTS = 256
PAGE_SIZE = 64
DEPTH = 7


@dataclass(frozen=True)
class Round:
    """One call's rows: the paths of a batch in some slots, and the same as lists of rows."""

    paths: AcceptedPaths
    slot: Tensor
    source: Tensor
    target: Tensor


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--moves", type=int, nargs="+", default=[0, 2, 7], help="rows a request")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--width", type=int, default=576, help="numbers in a row")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=None)
    parser.add_argument("--columns", type=int, nargs="+", default=None)
    parser.add_argument("--together", type=int, nargs="+", default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    record = Record("commit", vars(arguments) | {"out": None}, arguments.out)
    device = torch.device("cuda")
    size = (SLOTS * PAGE_SIZE, arguments.width)
    dtype = getattr(torch, arguments.dtype)
    caches = [torch.randn(size, device=device).to(dtype) for _ in range(arguments.layers)]
    speed = copy_bytes_per_us()
    for moves, batch in product(arguments.moves, arguments.batches):
        for shape in shapes(arguments, batch):
            bench(record, caches, batch, moves, shape, speed)
    record.finish()
    return 0


def shapes(arguments: argparse.Namespace, batch: int) -> list[PathBlock]:
    """The shape in use, with what else was asked for."""
    own = PathBlock.of(batch)
    choices = product(
        arguments.rows or [own.rows],
        arguments.columns or [own.columns],
        arguments.together or [own.caches],
    )
    return [PathBlock(rows=r, columns=c, caches=g) for r, c, g in choices]


def bench(
    record: Record, caches: list[Tensor], batch: int, moves: int, shape: PathBlock, speed: float
) -> None:
    loader = KernelLoader(caches[0].device)
    reference = ReferenceOps(loader.device)
    table, state = CacheTable.of(caches), slot_state(loader.device)
    rounds = [make_round(i, batch, moves, state) for i in range(SLOTS // batch)]
    by_path = [partial(commit_paths, loader, table, r.paths, state, r.slot, shape) for r in rounds]
    by_list = [partial(commit_kv, loader, table, r.source, r.target) for r in rounds]
    for move in (by_path[0], by_list[0]):
        check(caches, move, rounds[0])
    by_torch = [partial(reference.commit_kv, caches, r.source, r.target) for r in rounds]
    samples = {"graph_us": graph_us(by_path), "stream_us": stream_us(by_path)}
    if moves:
        samples["list_us"] = graph_us(by_list)
        samples["torch_us"] = graph_us(by_torch[:4], at_least=4)
    moved = 2 * batch * moves * sum(map(row_bytes, caches))
    params = {"batch": batch, "moves": moves, "rows": shape.rows, "columns": shape.columns}
    params["together"] = shape.caches
    record.add(params, samples, {"floor_us": moved / speed})


def slot_state(device: torch.device) -> SlotState:
    """A page a slot, in any order, with the root at its beginning."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(SLOTS, generator=generator).int()[:, None]
    zero = torch.zeros(SLOTS, dtype=torch.int32)
    return SlotState(
        root=zero.to(device),
        root_position=zero.to(device),
        page_table=pages.to(device),
        page_size=PAGE_SIZE,
    )


def make_round(i: int, batch: int, moves: int, state: SlotState) -> Round:
    """Paths 0, 2, 4, .. of `moves` drafts; with none to move, DEPTH accepted ones in place."""
    device = state.root.device
    slot = torch.arange(i * batch, (i + 1) * batch, dtype=torch.int32, device=device)
    k = torch.arange(1 + DEPTH, dtype=torch.int32, device=device)
    node = (2 * k if moves else k).repeat(batch, 1)
    length = torch.full_like(slot, 1 + (moves or DEPTH))
    base = state.page_table[slot.long()].long() * PAGE_SIZE
    rows = [(base + node[:, 1 : 1 + moves]).flatten(), (base + k[1 : 1 + moves]).flatten()]
    return Round(
        paths=AcceptedPaths(node=node, length=length, bonus=slot),
        slot=slot,
        source=rows[0],
        target=rows[1],
    )


def check(caches: list[Tensor], move: Callable[[], None], one: Round) -> None:
    expected = [cache.clone() for cache in caches]
    ReferenceOps(caches[0].device).commit_kv(expected, one.source, one.target)
    move()
    if not all(map(torch.equal, caches, expected)):
        raise SystemExit(f"{move} moved other rows than the reference")


if __name__ == "__main__":
    sys.exit(main())
