#!/usr/bin/env python3
"""Microseconds of a layer's routed INT4 experts: one rank's share of Kimi K2.6 by default.

    python jobs/bench_moe.py --out benchmarks/results

us             moe_w4a16 in a CUDA graph: sorting, both products, the weighted sum
cooperative_us the same as a cooperative launch, which waits for the kernel before it to end
NAME_us        moe_w4a16.cu's two launches, with another design of the kernel (--variants)
sort_us        sorting alone; up to 16 rows the product's blocks do it
one_launch_us  by the kernel for one row or two, two_launches_us by the one for more, up to UP_TO
few_us         by the kernel for few rows, many_us by the one for many, each from FROM tokens on; us
               is by the one in use
sort_many_us   sorting for the latter
distinct       experts that a step's rows chose, of `experts`
gbps           their packed bytes over us
copy_fraction  of the speed of a large copy in this run, read and written bytes counted
torch_us       the same experts dequantised to bf16, by torch: gathered, all through bmm, or grouped

Rows choose at random. A graph holds steps that choose differently, more than fits L2 together.
Results are compared with torch's first, and designs with one another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_timing import copy_bytes_per_us, graph_us, need_gpu
from record import Record
from torch import Tensor

from kdray.kernels.cuda import CudaOps
from kdray.kernels.cuda_moe import FEW_ROWS, CudaMoe, column_tiles
from kdray.kernels.moe_design import Design
from kdray.kernels.moe_layout import STEP_BYTES, TILE, Int4, PackedExperts
from kdray.kernels.ops import RoutingRule
from kdray.kernels.reference_moe import weights_of
from kdray.model.moe import DenseMLP, MoE, Router

TOKENS = [1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256, 512, 1024, 2048]
UP_TO = FEW_ROWS  # tokens to which one launch is timed beside two
FROM = 128  # tokens from which the kernels for few rows and for many are timed
STEPS_OF_ONE_ROW = 24  # that choose differently; 25 MB each
VARIANTS = {
    "uneven": Design(catch_up=False),
    "engine": Design(by_lanes=False),
    "deep": Design(slots=4, parts=1),
    "deep_engine": Design(slots=4, parts=1, by_lanes=False),
    "long": Design(slot_steps=4, slots=2, parts=1),
    "long_engine": Design(slot_steps=4, slots=2, parts=1, by_lanes=False),
}
MOST_DIFFERENCE = 0.02  # of norms: torch rounds a weight to bf16


@dataclass(frozen=True, eq=False)
class Step:
    """A step's rows and what they chose."""

    x: Tensor
    expert: Tensor
    weight: Tensor
    shared: Tensor

    @property
    def distinct(self) -> int:
        return len(self.expert.unique())


@dataclass(frozen=True, eq=False)
class Layer:
    """The same experts twice: packed, and dequantised for torch (None: not wished)."""

    packed: PackedExperts
    dequantised: MoE | None

    @property
    def expert_bytes(self) -> int:
        return 3 * self.packed.width * self.packed.inner // TILE**2 * STEP_BYTES

    def by_torch(self, step: Step) -> Tensor:
        assert self.dequantised is not None
        chosen = self.dequantised._chosen(step.x, step.expert)
        weighted = chosen.float() * step.weight[..., None]
        return (weighted.sum(1) + step.shared).to(step.x.dtype)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--inner", type=int, default=256, help="a rank's part")
    parser.add_argument(
        "--variants",
        nargs="*",
        choices=VARIANTS,
        default=None,
        help="designs to time beside the one in use; without names, all",
    )
    parser.add_argument("--no-torch", action="store_true", help="without the rival")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    torch.manual_seed(0)
    record = Record("moe_w4a16", vars(arguments) | {"out": None}, arguments.out)
    layer = drawn_layer(arguments)
    ops = CudaOps(torch.device("cuda"))
    ways = {"us": CudaMoe(ops.loader), "cooperative_us": CudaMoe(ops.loader, overlap=False)}
    for name in VARIANTS if arguments.variants == [] else arguments.variants or []:
        ways[f"{name}_us"] = CudaMoe(ops.loader, design=VARIANTS[name], few_rows=0)
    launches = {
        "one_launch_us": CudaMoe(ops.loader, few_rows=UP_TO),
        "two_launches_us": CudaMoe(ops.loader, few_rows=0),
    }
    kernels = {
        "few_us": CudaMoe(ops.loader, many=False),
        "many_us": CudaMoe(ops.loader, many=True),
    }
    speed = copy_bytes_per_us()
    for tokens in arguments.tokens:
        beside = kernels if tokens >= FROM else launches if tokens <= UP_TO else {}
        bench(record, layer, ways | beside, tokens, arguments, speed)
    record.finish()
    return 0


def bench(
    record: Record,
    layer: Layer,
    ways: dict[str, CudaMoe],
    tokens: int,
    arguments: argparse.Namespace,
    speed: float,
) -> None:
    count = max(2, STEPS_OF_ONE_ROW // tokens)
    steps = [drawn_step(tokens, layer.packed, arguments.top_k) for _ in range(count)]
    if layer.dequantised is not None:
        compare(ways["us"], layer, steps[0])
    agree(ways, layer, steps[0])
    nodes = max(count, 8)
    samples = {
        name: graph_us([ours(moe, layer, step) for step in steps], at_least=nodes)
        for name, moe in ways.items()
    }
    tiles = column_tiles(steps[0].expert.numel(), arguments.experts)
    sort = [sorting(ways["us"], step, arguments.experts, tiles) for step in steps]
    samples["sort_us"] = graph_us(sort, at_least=50)
    if "many_us" in ways:
        sort = [sorting_many(ways["many_us"], step, arguments.experts) for step in steps]
        samples["sort_many_us"] = graph_us(sort, at_least=50)
    if layer.dequantised is not None:
        rival = [lambda step=step: layer.by_torch(step) for step in steps]
        samples["torch_us"] = graph_us(rival, at_least=nodes)
    distinct = sum(step.distinct for step in steps) / count
    middle = sorted(samples["us"])[len(samples["us"]) // 2]
    rate = distinct * layer.expert_bytes / middle
    extra = {"distinct": distinct, "gbps": rate / 1e3, "copy_fraction": rate / speed}
    record.add({"tokens": tokens, "experts": arguments.experts}, samples, extra)


def ours(moe: CudaMoe, layer: Layer, step: Step) -> Callable[[], Tensor]:
    return lambda: moe.moe_w4a16(step.x, step.expert, step.weight, layer.packed, step.shared)


def sorting(moe: CudaMoe, step: Step, experts: int, tiles: int) -> Callable[[], object]:
    return lambda: moe.sort_rows(step.expert, experts, tiles)


def sorting_many(moe: CudaMoe, step: Step, experts: int) -> Callable[[], object]:
    return lambda: moe.many.sort_rows(step.expert, experts)


def compare(moe: CudaMoe, layer: Layer, step: Step) -> None:
    found, wanted = ours(moe, layer, step)().double(), layer.by_torch(step).double()
    error = ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()
    if not error < MOST_DIFFERENCE:
        raise SystemExit(f"{len(step.x)} rows differ from torch: {error:.3g} of a row's norm")


def agree(ways: dict[str, CudaMoe], layer: Layer, step: Step) -> None:
    wanted = ours(ways["us"], layer, step)()
    for name, moe in ways.items():
        if not torch.equal(ours(moe, layer, step)(), wanted):
            raise SystemExit(f"{name} gives other bits than us, for {len(step.x)} rows")


def drawn_step(tokens: int, experts: PackedExperts, top_k: int) -> Step:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    return Step(
        x=drawn(tokens, experts.width),
        expert=torch.rand(tokens, experts.num_experts, device="cuda").topk(top_k).indices,
        weight=torch.rand(tokens, top_k, device="cuda"),
        shared=drawn(tokens, experts.width),
    )


def drawn_layer(sizes: argparse.Namespace) -> Layer:
    """Expert by expert, so that little memory is taken beside the result."""
    packed = PackedExperts.empty(sizes.experts, sizes.width, sizes.inner, "cuda")
    for number in range(sizes.experts):
        gate, up = (drawn_int4(sizes.inner, sizes.width) for _ in range(2))
        packed.put(number, gate, up, drawn_int4(sizes.width, sizes.inner))
    return Layer(packed, None if sizes.no_torch else dequantised(packed, sizes))


def drawn_int4(outputs: int, inputs: int) -> Int4:
    q = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, device="cuda")
    scale = torch.rand(outputs, inputs // TILE, device="cuda") * 0.004 + 0.004
    return Int4(q, scale.to(torch.bfloat16))


def dequantised(packed: PackedExperts, sizes: argparse.Namespace) -> MoE:
    def room(*shape: int) -> Tensor:
        return torch.empty(sizes.experts, *shape, dtype=torch.bfloat16, device="cuda")

    gate_up, down = room(sizes.width, 2 * sizes.inner), room(sizes.inner, sizes.width)
    for number in range(sizes.experts):
        gate, up, narrow = weights_of(packed, number)
        gate_up[number], down[number] = torch.cat([gate, up]).T, narrow.T
    ops = CudaOps(torch.device("cuda"))
    rule = RoutingRule(top_k=sizes.top_k, num_groups=1, top_groups=1, normalize=True, scale=1.0)
    nothing = torch.empty(0, device="cuda")  # rows come routed, and with the shared expert's output
    router, shared = Router(ops, nothing, nothing, rule), DenseMLP(ops, nothing, nothing)
    return MoE(ops, router, gate_up, down, shared)


if __name__ == "__main__":
    sys.exit(main())
