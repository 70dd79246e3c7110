#!/usr/bin/env python3
"""Microseconds of a drafter's block attention over its paged context, on the GPU.

    python jobs/bench_draft_attention.py --out benchmarks/results

us              draft_attention in a CUDA graph; every node has a cache of its own, beyond L2
floor_us        keys and values read once, at the speed of a large copy measured in this run
fraction        floor_us over us
sdpa_us         torch's scaled_dot_product_attention over keys that lie gathered already, no mask
reference_us    the reference in the same graph: gathers every position of every page table, masks

Contexts are all of one length (spread even), or one is and the others have 10 positions (spread
one): then the reference gathers the longest for all. Every timed shape is compared with the
reference in float32 first.
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
import torch.nn.functional as F
from gpu_timing import Call, copy_bytes_per_us, graph_us, need_gpu
from record import Record
from torch import Tensor

from kdray.kernels.attention_batch import DraftAttentionBatch
from kdray.kernels.cuda_draft import LEAST_STEPS, CudaDraftAttention, DraftPlan, plan_for
from kdray.kernels.loader import KernelLoader
from kdray.kernels.reference_draft import BlockView, attend_blocks

PAGE = 64
SHORT = 10  # positions of those that are not long
BEYOND_L2 = 160 << 20
MAX_SETS, MAX_BYTES = 96, 12 << 30
RIVAL_BYTES = 3 << 30  # of gathered contexts

BOUND = 2.0**-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    batch: int
    context: int
    spread: str
    slots: int
    heads: int
    groups: int
    dim: int

    @property
    def lengths(self) -> list[int]:
        if self.spread == "even":
            return [self.context] * self.batch
        return [self.context, *[SHORT] * (self.batch - 1)]

    @property
    def key_bytes(self) -> int:
        """Of one position, its value included."""
        return 2 * self.groups * self.dim * 2

    @property
    def bytes_read(self) -> int:
        return (sum(self.lengths) + self.batch * self.slots) * self.key_bytes

    @property
    def bytes_gathered(self) -> int:
        return self.batch * (self.context + self.slots) * self.key_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    query: Tensor
    own: Tensor
    cache: Tensor
    batch: DraftAttentionBatch

    @property
    def scale(self) -> float:
        return float(self.query.shape[3] ** -0.5)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 32768])
    parser.add_argument("--spreads", nargs="+", choices=["even", "one"], default=["even", "one"])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--pieces", type=int, nargs="+", help="a key head, not the usual ones")
    parser.add_argument("--least", type=int, nargs="+", default=[LEAST_STEPS])
    parser.add_argument("--stages", type=int, default=None, help="of the kernel's ring")
    parser.add_argument("--resident", type=int, default=None, help="blocks a multiprocessor")
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    record = Record("draft_attention", vars(arguments) | {"out": None}, arguments.out)
    speed = copy_bytes_per_us()
    print(f"copy {speed / 1e6:.3f} TB/s", flush=True)
    for spread, batch, context in product(arguments.spreads, arguments.batches, arguments.contexts):
        if spread == "one" and batch == 1:
            continue
        heads = {name: getattr(arguments, name) for name in ("slots", "heads", "groups", "dim")}
        compare(
            record, Shape(batch=batch, context=context, spread=spread, **heads), speed, arguments
        )
    record.finish()
    return 0


def compare(record: Record, shape: Shape, speed: float, arguments: argparse.Namespace) -> None:
    """A row for each way to cut the work; rivals beside the first."""
    sets = input_sets(shape)
    rivals = {} if arguments.no_rivals else rivals_of(shape, sets)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    usual = plan_for(processors, shape.batch, shape.groups).pieces
    for pieces, least in product(arguments.pieces or [usual], arguments.least):
        attention = attention_of(pieces, least, arguments)
        check(attention, sets[0], shape)
        calls = [partial(ours, attention, inputs) for inputs in sets]
        samples = {"us": graph_us(calls, replays=arguments.replays, at_least=20)}
        for name, rival in rivals.items():
            samples[name] = graph_us([rival], replays=arguments.replays, at_least=4)
        floor = shape.bytes_read / speed
        us = sorted(samples["us"])[len(samples["us"]) // 2]
        params = {"batch": shape.batch, "context": shape.context, "spread": shape.spread}
        if arguments.pieces or len(arguments.least) > 1:
            params |= {"pieces": pieces, "least": least}
        record.add(params, samples, {"floor_us": floor, "fraction": floor / us})
        rivals = {}


def attention_of(pieces: int, least: int, arguments: argparse.Namespace) -> CudaDraftAttention:
    return CudaDraftAttention(
        KernelLoader(torch.device("cuda")),
        plan=DraftPlan(pieces, least, arguments.stages),
        variant={} if arguments.resident is None else {"RESIDENT": arguments.resident},
    )


def input_sets(shape: Shape) -> list[Inputs]:
    number = min(MAX_SETS, max(2, -(-BEYOND_L2 // shape.bytes_read)))
    number = max(1, min(number, MAX_BYTES // shape.bytes_read))
    return [make_inputs(shape, seed) for seed in range(number)]


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Pages in random order; behind a short context the page table repeats one page."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pages = [-(-length // PAGE) for length in shape.lengths]
    order = torch.randperm(sum(pages), generator=generator, device="cuda").int()
    table = torch.zeros(shape.batch, max(pages), dtype=torch.int32, device="cuda")
    for row, own in zip(table, order.split(pages), strict=True):
        row[: len(own)] = own
    kv = (2, shape.groups, shape.dim)
    numbers = partial(drawn, generator)
    return Inputs(
        query=numbers(shape.batch, shape.slots, shape.heads, shape.dim),
        own=numbers(shape.batch, shape.slots, *kv),
        cache=numbers(sum(pages) * PAGE, *kv),
        batch=DraftAttentionBatch(
            end=torch.tensor(shape.lengths, dtype=torch.int32, device="cuda"),
            page_table=table,
            page_size=PAGE,
            causal=False,
            window=None,
        ),
    )


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    return x.normal_(generator=generator)


def ours(attention: CudaDraftAttention, inputs: Inputs) -> Tensor:
    return attention.draft_attention(
        inputs.query, inputs.own, inputs.cache, inputs.batch, inputs.scale
    )


def check(attention: CudaDraftAttention, inputs: Inputs, shape: Shape) -> None:
    """The first and the last request against the reference in float32."""
    found = ours(attention, inputs)
    for r in {0, shape.batch - 1}:
        own = slice(r, r + 1)
        batch = DraftAttentionBatch(
            end=inputs.batch.end[own],
            page_table=inputs.batch.page_table[own],
            page_size=PAGE,
            causal=False,
            window=None,
        )
        view = BlockView.of(batch, shape.slots)
        key = view.read(inputs.cache).float()
        # The gathered rows are a cache of their own, so that not all of it need be float32.
        straight = BlockView(
            slots=torch.arange(key.shape[1], device="cuda")[None],
            padding=view.padding,
            visible=view.visible,
        )
        wanted = attend_blocks(
            inputs.query[own].float(), inputs.own[own].float(), key[0], straight, inputs.scale
        )
        off = float((found[own].float() - wanted).norm() / wanted.norm())
        if not off < BOUND:
            raise SystemExit(f"draft_attention is wrong at {shape}: relative difference {off}")


def rivals_of(shape: Shape, sets: Sequence[Inputs]) -> dict[str, Call]:
    if shape.bytes_gathered > RIVAL_BYTES:
        return {}
    inputs = sets[0]
    view = BlockView.of(inputs.batch, shape.slots)
    reference: Callable[[], object] = partial(
        attend_blocks, inputs.query, inputs.own, inputs.cache, view, inputs.scale
    )
    rows = view.read(inputs.cache)
    rows[:, -shape.slots :] = inputs.own
    key, value = rows.permute(2, 0, 3, 1, 4).contiguous()
    sdpa = partial(
        F.scaled_dot_product_attention,
        inputs.query.transpose(1, 2).contiguous(),
        key,
        value,
        scale=inputs.scale,
        enable_gqa=shape.groups < shape.heads,
    )
    return {"sdpa_us": sdpa, "reference_us": reference}


if __name__ == "__main__":
    sys.exit(main())
