#!/usr/bin/env python3
"""Microseconds from the drafter's logits to the draft tree, on the GPU.

    python jobs/bench_logits_to_tree.py --out benchmarks/results

graph_us   topk_logprob and build_tree (masks, positions, links) in a CUDA graph; every call has
           logits of its own, together beyond L2
torch_us   what an engine does today: torch.topk and logsumexp of the float32 logits, then the host
           builder, one request at a time, by the host's clock
floor_us   the logits' bytes once, at the speed of a large copy measured in this run

Before anything is timed, the trees are compared with the reference's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_timing import copy_bytes_per_us, graph_us, host_us, need_gpu
from host_tree import build_host_trees
from record import Record
from torch import Tensor

from kdray.core.plan import Candidates
from kdray.kernels.cuda_topk import CudaTopk
from kdray.kernels.cuda_trees import BuiltTrees, build_trees_into, empty_trees
from kdray.kernels.loader import KernelLoader
from kdray.kernels.reference import ReferenceOps

VOCAB = 163840
CANDIDATES = 16
BEYOND_L2 = 160 << 20  # bytes of logits between two uses of the same
MAX_SETS = 40


@dataclass(frozen=True, eq=False)
class Call:
    """One batch: logits [R, L, VOCAB] bf16, roots, budgets and positions [R] int32, its trees."""

    logits: Tensor
    roots: Tensor
    budgets: Tensor
    base: Tensor
    out: BuiltTrees

    def run(self, loader: KernelLoader, topk: CudaTopk) -> Candidates:
        token, score = topk.topk_logprob(self.logits, CANDIDATES)
        candidates = Candidates(token=token, score=score)
        build_trees_into(loader, self.out, candidates, self.roots, self.budgets, base=self.base)
        return candidates


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--depths", type=int, nargs="+", default=[7, 15])
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    config = vars(arguments) | {"out": None, "vocab": VOCAB, "candidates": CANDIDATES}
    record = Record("logits_to_tree", config, arguments.out)
    loader, bytes_per_us = KernelLoader(torch.device("cuda")), copy_bytes_per_us()
    print(f"copy {bytes_per_us / 1e6:.3f} TB/s", flush=True)
    for depth, batch in product(arguments.depths, arguments.batches):
        logits = make_logits(batch, depth)
        for budget in arguments.budgets:
            bench(loader, record, [make_call(x, budget) for x in logits], budget, bytes_per_us)
    record.finish()
    return 0


def make_logits(batch: int, depth: int) -> list[Tensor]:
    """Sets of normal logits, sure at first and vague later, enough of them to leave L2."""
    size = batch * depth * VOCAB * 2
    generator = torch.Generator("cuda").manual_seed(depth)
    scale = torch.linspace(7.7, 2.45, depth, device="cuda")[:, None]
    number = min(MAX_SETS, max(2, -(-BEYOND_L2 // size)))
    shape = (batch, depth, VOCAB)
    return [
        (scale * torch.randn(shape, generator=generator, device="cuda")).bfloat16()
        for _ in range(number)
    ]


def make_call(logits: Tensor, budget: int) -> Call:
    requests, device = len(logits), logits.device
    numbers = torch.arange(requests, dtype=torch.int32, device=device)
    return Call(
        logits=logits,
        roots=numbers + 7,
        budgets=torch.full_like(numbers, budget),
        base=numbers * 100,
        out=empty_trees(requests, 1 + budget, device, position=True, links=True),
    )


def bench(
    loader: KernelLoader, record: Record, calls: list[Call], budget: int, bytes_per_us: float
) -> None:
    topk = CudaTopk(loader)
    check(calls[0], calls[0].run(loader, topk), budget)
    batch, depth, vocab = calls[0].logits.shape
    runs = [partial(call.run, loader, topk) for call in calls]
    today = host_us(partial(as_today, calls[0].logits, budget), repeats=5)
    record.add(
        {"batch": batch, "budget": budget, "depth": depth, "vocab": vocab},
        {"graph_us": graph_us(runs, replays=30, at_least=10), "torch_us": today},
        {"floor_us": calls[0].logits.nbytes / bytes_per_us},
    )


def as_today(logits: Tensor, budget: int) -> object:
    """Top-k and normaliser by torch, trees by the host."""
    rows = logits.float()
    best = rows.topk(min(budget, CANDIDATES), dim=-1)
    logprob = best.values - rows.logsumexp(dim=-1, keepdim=True)
    return build_host_trees(logprob, best.indices, budget)


def check(call: Call, candidates: Candidates, budget: int) -> None:
    """Top-k against the reference on the device, trees against core's on the host."""
    token, score = ReferenceOps(call.logits.device).topk_logprob(call.logits, CANDIDATES)
    if not torch.equal(candidates.token, token):
        raise SystemExit("topk_logprob is wrong: tokens differ from the reference")
    if (candidates.score.long() - score.long()).abs().max() > 64:  # 1.5e-5 nat: fp32 sums
        raise SystemExit("topk_logprob is wrong: scores differ from the reference")
    some = slice(0, 4)
    host = Candidates(token=candidates.token[some].cpu(), score=candidates.score[some].cpu())
    roots = call.roots[some].cpu()
    wanted = ReferenceOps(torch.device("cpu")).build_trees(host, roots, [budget] * len(roots))
    for column in fields(wanted):
        if not torch.equal(
            getattr(call.out.trees, column.name)[some].cpu(), getattr(wanted, column.name)
        ):
            raise SystemExit(f"build_tree is wrong: {column.name} differs from the reference")


if __name__ == "__main__":
    sys.exit(main())
