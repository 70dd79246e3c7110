#!/usr/bin/env python3
"""Microseconds to build a batch of draft trees on the GPU, and on the host as engines do today.

    python jobs/bench_tree_build.py --out benchmarks/results
    python jobs/bench_tree_build.py --quick
    python jobs/bench_tree_build.py --sweep      # the kernel's own designs and variants, no rivals

graph_us    build_tree in a CUDA graph of 50 nodes: tokens, parents, depths, scores, positions,
            masks, counts and links of the whole batch; candidates lie in L2, as behind a top-k
stream_us   the same issued from Python
cpu_ms      the heap on the host, one request after another, copies included (host_tree.py)
rival_ms    a function given with --rival, called as function(logprob, token, budget) a request
uno_us      sglang's UNO tree, where that package is installed: from logits of 4,096 tokens, in a
            graph where it can be captured

Row kinds (--kinds; 4,096 logits a position, the best min(budget, 32) kept): flat: sigma 2; peaked:
sigma 5; mix: sigma from 7.7 down to 2.45 along the positions, sure first, vague later; tie: flat
rounded to 1/4. Host times are taken on the first kind. Trees are compared with the reference first.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_timing import graph_us, host_us, need_gpu, stream_us
from host_tree import build_host_trees
from record import Record
from torch import Tensor

from kdray.core.plan import Candidates
from kdray.core.tree import FRACTION_BITS, MIN_LOGPROB
from kdray.kernels.cuda_trees import (
    DESIGNS,
    THRESHOLD_256,
    THRESHOLD_1024,
    BuiltTrees,
    TreeDesign,
    build_trees_into,
    choose_design,
    empty_trees,
)
from kdray.kernels.loader import KernelLoader
from kdray.kernels.reference import ReferenceOps

VOCAB = 4096
WIDTH = 32
SETS = 4  # of inputs, in turn
KINDS = ("mix", "flat", "peaked", "tie")
BATCHES = (1, 8, 32, 64)
BUDGETS = (7, 8, 15, 16, 31, 32, 63, 64, 128, 256, 512, 1024)
UNO_NODES = 128
UNO_CANDIDATES = 2048  # nodes times candidates
OTHER_THREADS = {THRESHOLD_256: (256,), THRESHOLD_1024: (256, 1024)}
Builder = Callable[[Tensor, Tensor, int], object]
Samples = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Inputs of one build: logits [R, L, VOCAB], the best of them with log-probs [R, L, K]."""

    logits: Tensor
    logprob: Tensor
    candidates: Candidates
    roots: Tensor
    base: Tensor
    budgets: Tensor


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--depths", type=int, nargs="+", default=[7, 15])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--replays", type=int, default=30, help="samples of each graph time")
    parser.add_argument("--rival", help="module:function(logprob [L, K], token [L, K], budget)")
    parser.add_argument("--quick", action="store_true", help="a third of the rows, depth 7")
    parser.add_argument("--sweep", action="store_true", help="designs and variants, no host")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    if arguments.quick:
        arguments.batches, arguments.depths = [1, 64], [7]
        arguments.budgets = [b for b in arguments.budgets if b in (8, 16, 32, 64, 128, 256, 1024)]
    loader = KernelLoader(torch.device("cuda"))
    name = "tree_build_sweep" if arguments.sweep else "tree_build"
    record = Record(name, vars(arguments) | {"out": None}, arguments.out)
    rivals = () if arguments.sweep else find_rivals(arguments.rival)
    for depth in arguments.depths:
        for budget in arguments.budgets:
            for batch in arguments.batches:
                for kind in arguments.kinds:
                    bench(arguments, loader, record, (batch, budget, depth, kind), rivals)
    record.finish()
    return 0


def bench(
    arguments: argparse.Namespace,
    loader: KernelLoader,
    record: Record,
    shape: tuple[int, int, int, str],
    rivals: Sequence[tuple[str, Builder]],
) -> None:
    batch, budget, depth, kind = shape
    sets = [make_batch(seed, batch, budget, depth, kind) for seed in range(SETS)]
    params = {"batch": batch, "budget": budget, "depth": depth, "rows": kind}
    if arguments.sweep:
        for label, design in variants(budget).items():
            calls = [check_and_call(loader, one, budget, design) for one in sets]
            samples: Samples = {"graph_us": graph_us(calls, replays=arguments.replays)}
            record.add(params | {"design": label}, samples)
        return
    design = choose_design(budget)
    calls = [check_and_call(loader, one, budget, design) for one in sets]
    samples = {"graph_us": graph_us(calls, replays=arguments.replays)}
    if kind == arguments.kinds[0]:
        samples |= {"stream_us": stream_us(calls, repeats=10)}
        samples |= host_times(sets[0], budget, rivals)
    record.add(params | {"design": design.entry.removeprefix("build_tree_")}, samples)


def check_and_call(
    loader: KernelLoader, batch: Batch, budget: int, design: TreeDesign
) -> Callable[[], None]:
    """A build into buffers of its own, right for the first requests of the batch."""
    device = batch.roots.device
    out = empty_trees(len(batch.roots), 1 + budget, device, position=True, links=True)
    build = partial(
        build_trees_into,
        loader,
        out,
        batch.candidates,
        batch.roots,
        batch.budgets,
        base=batch.base,
        design=design,
    )
    build()
    check_trees(out, batch, budget, some=2 if budget <= 128 else 1)
    return build


def check_trees(out: BuiltTrees, batch: Batch, budget: int, some: int) -> None:
    some = min(some, len(batch.roots))
    host = Candidates(
        token=batch.candidates.token[:some].cpu(), score=batch.candidates.score[:some].cpu()
    )
    roots = batch.roots[:some].cpu()
    wanted = ReferenceOps(torch.device("cpu")).build_trees(host, roots, [budget] * some)
    for column in fields(wanted):
        found = getattr(out.trees, column.name)[:some].cpu()
        if not torch.equal(found, getattr(wanted, column.name)):
            raise SystemExit(f"build_tree is wrong: {column.name} at budget {budget}")


def variants(budget: int) -> dict[str, TreeDesign]:
    """All that can build such trees, by name."""
    found: dict[str, TreeDesign] = {}
    for design in DESIGNS:
        name = design.entry.removeprefix("build_tree_")
        if not budget <= design.max_budget <= 4 * max(budget, 64):
            continue
        found[name] = design
        if "pop" in name and choose_design(budget) == design:
            for unroll in (4, 16, 32):
                defines = (("KDRAY_POP_UNROLL", unroll),)
                found[f"{name} unroll {unroll}"] = replace(design, defines=defines)
        for threads in OTHER_THREADS.get(design, ()):
            defines = ((f"KDRAY_THRESHOLD_THREADS_{design.max_budget}", threads),)
            found[f"{name} threads {threads}"] = replace(design, threads=threads, defines=defines)
    return found


def host_times(
    batch: Batch, budget: int, rivals: Sequence[tuple[str, Builder]]
) -> dict[str, list[float]]:
    """Milliseconds on the host and microseconds of UNO, on the batch's inputs."""
    token = batch.candidates.token
    repeats = 3 if len(batch.roots) * budget >= 4096 else 5
    cpu = host_us(partial(build_host_trees, batch.logprob, token, budget), repeats=repeats)
    found = {"cpu_ms": [us / 1e3 for us in cpu]}
    for name, rival in rivals:
        if name == "uno_us":
            found |= uno_times(rival, batch, budget)
            continue
        times = host_us(partial(one_by_one, rival, batch, budget), repeats=repeats)
        found[name] = [us / 1e3 for us in times]
    return found


def one_by_one(rival: Builder, batch: Batch, budget: int) -> None:
    for logprob, token in zip(batch.logprob, batch.candidates.token, strict=True):
        rival(logprob, token, budget)


def uno_times(build: Callable[..., object], batch: Batch, budget: int) -> dict[str, list[float]]:
    """UNO counts the root among its nodes and has limits of its own."""
    width = batch.candidates.token.shape[2]
    nodes = budget + 1
    if nodes > UNO_NODES or nodes * width > UNO_CANDIDATES:
        return {}
    call = partial(
        build,
        batch.roots.long(),
        batch.logits,
        max_nodes=nodes,
        candidate_top_k=width,
        temperature=1.0,
    )
    try:
        return {"uno_us": graph_us([call])}
    except (RuntimeError, ValueError) as error:
        print(f"UNO does not run at {nodes} nodes of {width} candidates: {error}")
        return {}


def find_rivals(named: str | None) -> list[tuple[str, Builder]]:
    found: list[tuple[str, Builder]] = []
    if named is not None:
        module, _, function = named.partition(":")
        found.append(("rival_ms", getattr(importlib.import_module(module), function)))
    try:
        from sglang.kernels.ops.speculative.uno_tree import build_uno_tree_proposal
    except ImportError as error:
        print(f"without sglang's UNO tree: {error}")
    else:
        found.append(("uno_us", build_uno_tree_proposal))
    return found


def make_batch(seed: int, requests: int, budget: int, depth: int, kind: str) -> Batch:
    """Rows as a drafter might give them; kinds as in the module's docstring."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(requests, depth, VOCAB, device=device, generator=generator)
    logits *= spread_of(kind, depth).to(device)[:, None]
    if kind == "tie":
        logits = (logits * 4).round() / 4
    best, token = logits.topk(min(budget, WIDTH), dim=-1)
    logprob = best - logits.logsumexp(dim=-1, keepdim=True)
    score = (logprob.clamp(MIN_LOGPROB, 0.0) * 2**FRACTION_BITS).round().int()
    count = torch.arange(requests, dtype=torch.int32, device=device)
    return Batch(
        logits=logits,
        logprob=logprob,
        candidates=Candidates(token=token.int(), score=score),
        roots=count + 1,
        base=count * 100,
        budgets=torch.full_like(count, budget),
    )


def spread_of(kind: str, depth: int) -> Tensor:
    """Standard deviation of a position's logits: [L]."""
    if kind == "mix":
        return torch.linspace(7.7, 2.45, depth)
    return torch.full((depth,), 5.0 if kind == "peaked" else 2.0)


if __name__ == "__main__":
    sys.exit(main())
