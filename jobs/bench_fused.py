#!/usr/bin/env python3
"""Microseconds of the small ops of a layer, as kernels and by the torch ops they replace.

    python jobs/bench_fused.py --out benchmarks/results

add_rms_norm   residual add and norm of rows of `width`
rope_cache     latent norm, rotations, cache write; `width` is the number of heads
absorb_query   rope_cache and per_head in one launch, where both take it (bfloat16)
per_head       W_UK of an absorbed query, into its place; `width` is the number of heads
swiglu         of a product of 2 * `width` columns
route_experts  `width` experts, 8 a row (256: by groups, 4 of 8)
experts        a MoE layer of 64 experts as the model runs it, for which nothing waits; `width` is
               the hidden size

graph_us       in a CUDA graph of 50 nodes
torch_us       reference_fused.py in such a graph; experts: torch's grouped product, where it runs
stream_us      issued from Python
floor_us       bytes read and written once, at the speed of a large copy measured in this run

Inputs repeat and sit in L2, as behind the product that made them. Results are compared with the
reference first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_timing import copy_bytes_per_us, graph_us, need_gpu, stream_us
from record import Record
from torch import Tensor

from kdray.kernels import reference_fused
from kdray.kernels.cuda import CudaOps
from kdray.kernels.ops import RoutingRule
from kdray.model.moe import DenseMLP, MoE, Router

LATENT, ROPE, NOPE = 512, 64, 128
EXPERTS, TOP_K, INNER = 64, 8, 1024
Outputs = tuple[Tensor, ...]


class SomeNorm(NamedTuple):
    weight: Tensor
    eps: Tensor


class SomeRows(NamedTuple):
    turns: Tensor
    slot: Tensor


@dataclass(frozen=True)
class Case:
    """One op on one input: our call, torch's (None: it has none), and bytes moved at least.

    nodes   calls a graph; long ones need fewer to be timed
    """

    ours: Callable[[], Outputs]
    torch: Callable[[], Outputs] | None
    num_bytes: int
    nodes: int = 50


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9, 64, 576])
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 2048, 7168])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--experts", type=int, nargs="+", default=[64, 256, 384])
    parser.add_argument("--ops", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    record = Record("fused", vars(arguments) | {"out": None}, arguments.out)
    ops, dtype = CudaOps(torch.device("cuda")), getattr(torch, arguments.dtype)
    speed = copy_bytes_per_us()
    for name in arguments.ops:
        for width in getattr(arguments, WIDTHS[name]):
            for rows in arguments.rows:
                params = {"op": name, "rows": rows, "width": width}
                bench(record, params, CASES[name](ops, rows, width, dtype), speed)
    record.finish()
    return 0


def bench(record: Record, params: dict[str, str | int], case: Case, speed: float) -> None:
    samples = {"graph_us": graph_us([case.ours], at_least=case.nodes)}
    samples["stream_us"] = stream_us([case.ours], at_least=case.nodes)
    if case.torch is not None:
        for mine, theirs in zip(case.ours(), case.torch(), strict=True):
            if (mine.double() - theirs.double()).norm() > 0.01 * theirs.double().norm():
                raise SystemExit(f"{params} differs from torch")
        samples["torch_us"] = graph_us([case.torch], at_least=case.nodes)
    record.add(params, samples, {"floor_us": case.num_bytes / speed})


def norm_of(width: int, dtype: torch.dtype) -> SomeNorm:
    return SomeNorm(torch.rand(width, device="cuda").to(dtype), torch.tensor(1e-6, device="cuda"))


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def add_rms_norm(ops: CudaOps, rows: int, width: int, dtype: torch.dtype) -> Case:
    x, delta = (drawn(rows, width, dtype=dtype) for _ in range(2))
    norm = norm_of(width, dtype)
    return Case(
        lambda: ops.add_rms_norm(x, delta, norm),
        lambda: reference_fused.add_rms_norm(x, delta, norm),
        (4 * x.numel() + width) * dtype.itemsize,
    )


class Roped(NamedTuple):
    """What rope_cache takes, in its order."""

    query: Tensor
    kv: Tensor
    cache: Tensor
    rows: SomeRows
    norm: SomeNorm

    @classmethod
    def of(cls, rows: int, heads: int, dtype: torch.dtype) -> Roped:
        """KV is the end of a wider product's rows."""
        product = drawn(rows, 1536 + LATENT + ROPE, dtype=dtype)
        turns = torch.polar(torch.ones(rows, ROPE // 2, device="cuda"), drawn(rows, ROPE // 2))
        return cls(
            drawn(rows, heads, NOPE + ROPE, dtype=dtype),
            product[:, 1536:],
            drawn(4096, LATENT + ROPE, dtype=dtype),
            SomeRows(turns, torch.randperm(4096, device="cuda")[:rows]),
            norm_of(LATENT, dtype),
        )


def rope_cache(ops: CudaOps, rows: int, heads: int, dtype: torch.dtype) -> Case:
    given = Roped.of(rows, heads, dtype)

    def turned(rope: Callable[..., Tensor]) -> Outputs:
        return (rope(*given)[..., LATENT:],)

    numbers = rows * 2 * (LATENT + ROPE + heads * ROPE) + LATENT
    return Case(
        lambda: turned(ops.rope_cache),
        lambda: turned(reference_fused.rope_cache),
        numbers * dtype.itemsize + rows * ROPE * 4,
    )


def absorb_query(ops: CudaOps, rows: int, heads: int, dtype: torch.dtype) -> Case:
    """A matrix's outputs have their weights side by side, as a checkpoint has them."""
    weight = (drawn(heads, LATENT, NOPE) * NOPE**-0.5).to(dtype).mT
    given = (*Roped.of(rows, heads, dtype), weight)
    torch.cuda.synchronize()  # a kernel fetches weights ahead of the launch in front
    numbers = rows * 2 * (LATENT + ROPE + heads * (NOPE + LATENT + ROPE)) + weight.numel()
    return Case(
        lambda: (ops.absorb_query(*given),),
        lambda: (reference_fused.absorb_query(*given),),
        numbers * dtype.itemsize + rows * ROPE * 4,
    )


def per_head(ops: CudaOps, rows: int, heads: int, dtype: torch.dtype) -> Case:
    query = drawn(rows, heads, NOPE + ROPE, dtype=dtype)
    weight = drawn(heads, NOPE, LATENT, dtype=dtype)
    mine, theirs = (drawn(rows, heads, LATENT + ROPE, dtype=dtype) for _ in range(2))

    def filled(per_head: Callable[..., Tensor], out: Tensor) -> Outputs:
        return (per_head(query[..., :NOPE], weight, out[..., :LATENT]),)

    numbers = weight.numel() + rows * heads * (NOPE + LATENT)
    return Case(
        lambda: filled(ops.per_head, mine),
        lambda: filled(reference_fused.per_head, theirs),
        numbers * dtype.itemsize,
    )


def swiglu(ops: CudaOps, rows: int, width: int, dtype: torch.dtype) -> Case:
    gate_up = drawn(rows, 2 * width, dtype=dtype)
    return Case(
        lambda: (ops.swiglu(gate_up),),
        lambda: (reference_fused.swiglu(gate_up),),
        3 * rows * width * dtype.itemsize,
    )


def route_experts(ops: CudaOps, rows: int, experts: int, dtype: torch.dtype) -> Case:
    logits, bias = drawn(rows, experts), drawn(experts)
    torch.cuda.synchronize()  # a kernel fetches the bias ahead of the launch in front
    rule = routing_rule(8 if experts == 256 else 1)
    return Case(
        lambda: ops.route_experts(logits, bias, rule)[1:],
        lambda: reference_fused.route_experts(logits, bias, rule)[1:],
        (rows * experts + experts) * 4 + rows * TOP_K * 12,
    )


def routing_rule(groups: int) -> RoutingRule:
    return RoutingRule(
        top_k=TOP_K, num_groups=groups, top_groups=-(-groups // 2), normalize=True, scale=2.5
    )


def experts(ops: CudaOps, rows: int, width: int, dtype: torch.dtype) -> Case:
    """Weights of 64 experts; the floor reads those of the experts chosen."""
    shapes = [(width, 2 * INNER), (INNER, width)]
    shared = DenseMLP(ops, *(drawn(*shape, dtype=dtype) * 0.02 for shape in shapes))
    weights = [drawn(EXPERTS, *shape, dtype=dtype) * 0.02 for shape in shapes]
    router = Router(ops, drawn(width, EXPERTS) * 0.02, drawn(EXPERTS) * 0.1, routing_rule(1))
    moe = MoE(ops, router, *weights, shared)
    x = drawn(rows, width, dtype=dtype)
    expert = router.route(x).expert
    used = len(expert.unique())
    return Case(
        lambda: (moe._chosen(x, expert),),
        grouped(moe, x, expert),
        used * 3 * width * INNER * dtype.itemsize,
        nodes=4,
    )


def grouped(moe: MoE, x: Tensor, expert: Tensor) -> Callable[[], Outputs] | None:
    """The same by torch's grouped product, which has a kernel on some architectures only."""
    if x.dtype != torch.bfloat16 or torch.cuda.get_device_capability()[0] not in (9, 10):
        return None

    def run() -> Outputs:
        order = expert.flatten().argsort(stable=True)
        ends = torch.zeros(EXPERTS, dtype=torch.int32, device=x.device)
        ends.scatter_add_(0, expert.flatten(), torch.ones_like(expert, dtype=torch.int32).flatten())
        ends = ends.cumsum(0, dtype=torch.int32)
        rows = x.index_select(0, order.div(TOP_K, rounding_mode="floor"))
        inner = moe.ops.swiglu(torch._grouped_mm(rows, moe.gate_up, offs=ends))
        outputs = torch._grouped_mm(inner, moe.down, offs=ends)
        return (torch.empty_like(outputs).index_copy_(0, order, outputs).view(*expert.shape, -1),)

    return run


CASES = {
    "add_rms_norm": add_rms_norm,
    "rope_cache": rope_cache,
    "absorb_query": absorb_query,
    "per_head": per_head,
    "swiglu": swiglu,
    "route_experts": route_experts,
    "experts": experts,
}
WIDTHS = {
    "add_rms_norm": "widths",
    "rope_cache": "heads",
    "absorb_query": "heads",
    "per_head": "heads",
    "swiglu": "widths",
    "route_experts": "experts",
    "experts": "widths",
}

if __name__ == "__main__":
    sys.exit(main())
