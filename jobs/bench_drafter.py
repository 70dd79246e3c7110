#!/usr/bin/env python3
"""Microseconds of a draft step of Kimi K2.6's drafter at its full size, MLPs in bf16 and in INT4.

    python jobs/bench_drafter.py --out benchmarks/results

Weights are random. Everything runs in CUDA graphs; weights are beyond L2 by far.

draft_us       a block of every request: layers, head, top-k; of which
mlps_us        the MLPs of all layers
head_us        the target's head and the top-k, the same for both
extend_us      context K/V of 4 committed tokens a request, which takes no MLP
floor_us       what draft_us must read, once: weights, head, context, by a large copy's speed
mlps_floor_us  the same of mlps_us
gb             of the drafter's weights, without the target's tables

Both ways share all that is not an MLP. An INT4 MLP is compared with its dequantised weights first.
--part cuts an MLP otherwise than draft_int4.py does (18432 is one expert of the kernel).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from gpu_timing import Call, copy_bytes_per_us, graph_us, need_gpu
from record import Record
from torch import Tensor

from kdray.core.plan import AcceptedPaths
from kdray.kernels.moe_layout import PackedExperts
from kdray.kernels.ops import Ops, load_ops
from kdray.kernels.reference_moe import weights_of
from kdray.model.dflash import DFlashNetwork, DraftLayer, DraftMLP, DraftWeights, WholeDraftMLP
from kdray.model.dflash_config import DFlashConfig
from kdray.model.draft_int4 import EveryPart, MlpForm, PackedDraftMLP, int4_of, part_of
from kdray.model.drafter import DFlashDrafter
from kdray.model.layers import RmsNorm, laid_out
from kdray.model.target_tables import TargetTables
from kdray.model.weight_bytes import drafter_bytes

KIMI = Path(__file__).resolve().parent / "kimi_k26" / "drafter"
PAGE = 64
CANDIDATES = 16
ACCEPTED = 4
FORMS: dict[str, MlpForm] = {"bf16": "whole", "int4": "packed"}
MOST_DIFFERENCE = 0.02  # of norms: torch rounds a weight to bf16
BF16 = torch.bfloat16
DEVICE = torch.device("cuda")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """R requests whose roots stand behind `context` committed tokens each."""

    roots: Tensor
    position: Tensor
    pages: Tensor
    paths: AcceptedPaths
    features: Tensor
    rows: Tensor


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    need_gpu()
    torch.manual_seed(0)
    record = Record("drafter", vars(arguments) | {"out": None}, arguments.out)
    config = DFlashConfig.from_folder(KIMI)
    ops = load_ops(DEVICE)
    drafters = drawn_drafters(config, ops, arguments)
    speed = copy_bytes_per_us()
    print(f"copy {speed / 1e6:.3f} TB/s", flush=True)
    with torch.inference_mode():
        for batch, context in product(arguments.batches, arguments.contexts):
            step = drawn_step(config, batch, context)
            for name, drafter in drafters.items():
                timed = calls(drafter, ops, step)
                bench(record, name, drafter, timed, {"batch": batch, "context": context}, speed)
    record.finish()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument(
        "--part", type=int, default=None, help="of the intermediate size (default: its own)"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    return parser.parse_args(argv)


def bench(
    record: Record,
    name: str,
    drafter: DFlashDrafter,
    timed: Mapping[str, Call],
    params: Mapping[str, int],
    speed: float,
) -> None:
    config = drafter.network.config
    weights = drafter_bytes(config, BF16, FORMS[name])
    fc = config.hidden_size**2 * len(config.target_layer_ids) * 2  # extend's alone
    key = 2 * config.num_kv_heads * config.head_dim * 2 * len(config.layers)
    head = drafter.tables.head.numel() * 2
    read = weights.total - fc + head + params["batch"] * params["context"] * key
    samples = {label: graph_us([call], at_least=4, replays=20) for label, call in timed.items()}
    extra = {
        "floor_us": read / speed,
        "mlps_floor_us": weights.mlps / speed,
        "gb": weights.total / 1e9,
    }
    record.add({"weights": name, **params}, samples, extra)


def calls(drafter: DFlashDrafter, ops: Ops, step: Step) -> dict[str, Call]:
    hidden = step.rows[:, 1:].contiguous()  # as the network leaves it: one product of all rows
    return {
        "draft_us": lambda: drafter.propose_on_device(step.roots, step.position, step.pages),
        "mlps_us": lambda: all_mlps(drafter, ops, step.rows),
        "head_us": lambda: ops.topk_logprob(F.linear(hidden, drafter.tables.head), CANDIDATES),
        "extend_us": lambda: drafter.extend_on_device(
            step.paths, step.features, step.position, step.pages
        ),
    }


def all_mlps(drafter: DFlashDrafter, ops: Ops, rows: Tensor) -> None:
    for layer in drafter.network.weights.layers:
        layer.mlp.partial(ops, rows.flatten(0, 1))


def drawn_step(config: DFlashConfig, batch: int, context: int) -> Step:
    width, pages = config.hidden_size, -(-(context + config.block_size) // PAGE)
    one = torch.ones(batch, dtype=torch.int32, device=DEVICE)
    node = torch.arange(config.block_size, dtype=torch.int32, device=DEVICE).repeat(batch, 1)
    return Step(
        roots=torch.randint(0, config.vocab_size, (batch,), dtype=torch.int32, device=DEVICE),
        position=one * context,
        pages=torch.randperm(batch * pages, device=DEVICE).int().view(batch, pages),
        paths=AcceptedPaths(node=node[:, :ACCEPTED].contiguous(), length=one * ACCEPTED, bonus=one),
        features=drawn(batch, config.block_size, len(config.target_layer_ids) * width),
        rows=drawn(batch, config.block_size, width),
    )


def drawn_drafters(
    config: DFlashConfig, ops: Ops, sizes: argparse.Namespace
) -> dict[str, DFlashDrafter]:
    """A drafter and another that has INT4 MLPs, over the same tables and cache."""
    part = sizes.part or part_of(config.intermediate_size)
    every = EveryPart.of(config.intermediate_size // part, DEVICE)
    layers = [drawn_layer(config) for _ in config.layers]
    packed = [replace(layer, mlp=drawn_packed(config, part, every)) for layer in layers]
    compare(ops, packed[0].mlp, config)
    wide = DraftWeights(
        fc=matrix(len(config.target_layer_ids) * config.hidden_size, config.hidden_size),
        hidden_norm=norm(config.hidden_size),
        layers=tuple(layers),
        norm=norm(config.hidden_size),
    )
    table = drawn(config.vocab_size, config.hidden_size) * config.hidden_size**-0.5
    most = max(sizes.batches) * -(-(max(sizes.contexts) + config.block_size) // PAGE)
    bf16, int4 = (
        DFlashDrafter(
            DFlashNetwork(config, weights, ops),
            TargetTables(embedding=table, head=table),
            ops=ops,
            candidates=CANDIDATES,
            page_size=PAGE,
            num_pages=num_pages,
        )
        for weights, num_pages in ((wide, most), (replace(wide, layers=tuple(packed)), 1))
    )
    for cache in bf16.cache:
        cache.normal_()
    int4.cache = bf16.cache
    return {"bf16": bf16, "int4": int4}


def drawn_layer(config: DFlashConfig) -> DraftLayer:
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, groups = config.num_heads, config.num_kv_heads
    return DraftLayer(
        input_norm=norm(width),
        qkv=matrix(width, (heads + 2 * groups) * dim),
        head_norm=norm(heads + groups, dim),
        key_norm=norm(groups, dim),
        out=matrix(heads * dim, width),
        post_norm=norm(width),
        mlp=WholeDraftMLP(matrix(width, 2 * inner), matrix(inner, width)),
    )


def drawn_packed(config: DFlashConfig, part: int, every: EveryPart) -> PackedDraftMLP:
    width, count = config.hidden_size, config.intermediate_size // part
    experts = PackedExperts.empty(count, width, part, DEVICE)
    for number in range(count):
        gate, up = (int4_of(matrix(width, part).T) for _ in range(2))
        experts.put(number, gate, up, int4_of(matrix(part, width).T))
    return PackedDraftMLP(experts, every)


def compare(ops: Ops, mlp: DraftMLP, config: DFlashConfig) -> None:
    """Ends the job unless the kernel gives what torch makes of the dequantised weights."""
    assert isinstance(mlp, PackedDraftMLP)
    whole = dequantised(mlp.parts)
    for blocks in (1, 3, 16):
        rows = drawn(blocks * config.block_size, config.hidden_size)
        found, wanted = (each.partial(ops, rows).double() for each in (mlp, whole))
        error = ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()
        if not error < MOST_DIFFERENCE:
            raise SystemExit(f"{blocks} blocks differ from torch: {error:.3g} of a row's norm")


def dequantised(parts: PackedExperts) -> WholeDraftMLP:
    gates, ups, downs = zip(*(weights_of(parts, n) for n in range(parts.num_experts)), strict=True)
    gate_up = torch.cat([*gates, *ups]).T.to(BF16).contiguous()
    return WholeDraftMLP(gate_up, torch.cat(downs, dim=1).T.to(BF16).contiguous())


def matrix(inputs: int, outputs: int) -> Tensor:
    """[in, out], in memory as the drafter's own."""
    return laid_out(drawn(outputs, inputs) * inputs**-0.5)


def norm(*shape: int) -> RmsNorm:
    return RmsNorm.of(torch.ones(shape, dtype=BF16, device=DEVICE), 1e-5)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=BF16)


if __name__ == "__main__":
    sys.exit(main())
