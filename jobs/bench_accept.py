#!/usr/bin/env python3
"""Microseconds to follow the target through a batch of draft trees, on the GPU and by the host.

    python jobs/bench_accept.py --out benchmarks/results

graph_us   accept_path in a CUDA graph of 50 nodes
stream_us  the same issued from Python, outputs allocated
host_us    trees and tokens to the host, core.tree.follow, paths back: a round that waits

Every timed batch is compared with the reference first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from gpu_timing import graph_us, host_us, need_gpu, stream_us
from record import Record
from torch import Tensor

from kdray.core.plan import Candidates, DraftTrees
from kdray.core.tree import quantise
from kdray.kernels.cuda_accept import accept_paths
from kdray.kernels.loader import KernelLoader
from kdray.kernels.reference import ReferenceOps

CANDIDATES = 8
WALK_ON = 0.8  # chance that the target draws one of a node's children


@dataclass(frozen=True)
class Batch:
    trees: DraftTrees
    target: Tensor


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--budgets", type=int, nargs="+", default=[7, 8, 16, 32, 64, 256, 1024])
    parser.add_argument("--depths", type=int, nargs="+", default=[7, 15])
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    record = Record("accept", vars(arguments) | {"out": None}, arguments.out)
    loader = KernelLoader(torch.device("cuda"))
    for depth in arguments.depths:
        for budget in arguments.budgets:
            for batch in arguments.batches:
                bench(loader, record, batch, budget, depth)
    record.finish()
    return 0


def bench(loader: KernelLoader, record: Record, batch: int, budget: int, depth: int) -> None:
    sets = [make_batch(seed, batch, budget, depth, loader.device) for seed in range(4)]
    reference = ReferenceOps(loader.device)
    for one in sets:
        got = accept_paths(loader, one.trees, one.target, depth).paths
        wanted = reference.accept_paths(one.trees, one.target, depth)
        for column in fields(got):
            if not torch.equal(getattr(got, column.name), getattr(wanted, column.name)):
                raise SystemExit(f"accept_path is wrong: {column.name} at {batch=} {budget=}")
    calls = [partial(accept_paths, loader, one.trees, one.target, depth) for one in sets]
    by_host = partial(reference.accept_paths, sets[0].trees, sets[0].target, depth)
    record.add(
        {"batch": batch, "budget": budget, "depth": depth},
        {
            "graph_us": graph_us(calls),
            "stream_us": stream_us(calls),
            "host_us": host_us(by_host),
        },
    )


def make_batch(seed: int, batch: int, budget: int, depth: int, device: torch.device) -> Batch:
    """Best-first trees of random rows, and tokens that follow them for a while."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, 2.0, (batch, depth, 64))
    logprob = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    score = quantise(-np.sort(-logprob)[..., : max(CANDIDATES, min(budget, 64))])
    token = rng.permuted(np.broadcast_to(np.arange(64, dtype=np.int32), logits.shape), axis=-1)
    token = np.ascontiguousarray(token[..., : score.shape[-1]])
    host = ReferenceOps(torch.device("cpu"))
    candidates = Candidates(token=torch.from_numpy(token), score=torch.from_numpy(score))
    roots = torch.zeros(batch, dtype=torch.int32)
    trees = host.build_trees(candidates, roots, [budget] * batch)
    target = follow_for_a_while(rng, trees)
    moved = {column.name: getattr(trees, column.name).to(device) for column in fields(trees)}
    return Batch(trees=DraftTrees(**moved), target=target.to(device))


def follow_for_a_while(rng: np.random.Generator, trees: DraftTrees) -> Tensor:
    """[R, N] int32: with chance WALK_ON the token of some child, else one that no child bears."""
    target = np.full(trees.token.shape, -1, dtype=np.int32)
    token, parent = trees.token.numpy(), trees.parent.numpy()
    for r, count in enumerate(trees.num_nodes.tolist()):
        for node in (1 + rng.permutation(count - 1)).tolist():
            if rng.random() < WALK_ON:
                target[r, parent[r, node]] = token[r, node]
    return torch.from_numpy(target)


if __name__ == "__main__":
    sys.exit(main())
