#!/usr/bin/env python3
"""Microseconds of tree-masked MLA over a paged latent cache, on the GPU.

    python jobs/bench_verify_attention.py --out benchmarks/results
    python jobs/bench_verify_attention.py --targets        # the nine shapes of the README alone
    python jobs/bench_verify_attention.py --targets --kv-dtype bf16 fp8 --no-rivals

us               verify_attention in a CUDA graph; every node has a cache of its own, beyond L2
gbps, tflops     the cache's bytes read once, and 2 (2 C + D) flops a row and key, over us
copy_fraction    gbps over the speed of a large copy; mma_fraction: tflops over a bf16 matmul's,
                 both measured in this run
invariant_us     verify_attention_invariant and merge_invariant, bits that no batch changes (bf16)
floor_us         the larger of bytes at copy speed and flops at the matmul's
torch_us         torch: bmm, mask on the last columns, softmax, bmm; contiguous keys, scores in bf16
flashinfer_us    FlashInfer's MLA, fa2, page 64, where installed: without a mask, as it has none

Rivals are for bf16. Rows in fp8 count with their scale and padding (656 bytes for 1,152 of bf16).
Every timed shape is compared with float32 torch first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from gpu_timing import Call, copy_bytes_per_us, graph_us, need_gpu
from record import Record
from torch import Tensor

from kdray.core.tree import ancestor_mask, mask_to_bool
from kdray.kernels.attention_rows import AttentionRows
from kdray.kernels.cuda_attention import CudaAttention
from kdray.kernels.cuda_invariant import CudaInvariantAttention
from kdray.kernels.cuda_plan import AttentionSchedule
from kdray.kernels.latent_rows import dequantised, is_fp8, quantised, row_bytes
from kdray.kernels.loader import KernelLoader

LATENT, ROPE, PAGE = 512, 64, 64
WIDTH = LATENT + ROPE
STRIDE = WIDTH + 8  # between rows, as verifier/kv_cache.py lays them out
SCALE = 192**-0.5
KV_DTYPES = ("bf16", "fp8")
BEYOND_L2 = 160 << 20
MAX_SETS, MAX_BYTES = 24, 40 << 30
BOUND = 2.0**-6
NODES, CONTEXTS, BATCHES = (1, 9, 17, 33, 65), (1024, 8192, 32768, 131072), (1, 8, 32)
# batch, context, rows a request, microseconds at most (8 heads)
TARGETS = (
    (1, 8192, 9, 13),
    (1, 32768, 33, 60),
    (8, 1024, 9, 12),
    (8, 8192, 9, 32),
    (8, 8192, 17, 50),
    (8, 8192, 33, 95),
    (8, 32768, 9, 105),
    (32, 8192, 9, 105),
    (32, 8192, 33, 330),
)


@dataclass(frozen=True, slots=True)
class Shape:
    batch: int
    context: int
    nodes: int
    heads: int
    kv_dtype: str = "bf16"

    @property
    def cache_bytes(self) -> int:
        row = row_bytes(LATENT, ROPE) if self.kv_dtype == "fp8" else WIDTH * 2
        return self.batch * (self.context + self.nodes) * row

    @property
    def flops(self) -> float:
        keys = self.context + self.nodes
        return 2.0 * self.batch * self.nodes * self.heads * keys * (2 * LATENT + ROPE)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """One set: query [T, H, C + D], cache [S, C + D] or rows in fp8, rows, and the mask as booleans
    [N, N]."""

    query: Tensor
    cache: Tensor
    rows: AttentionRows
    tree: Tensor


@dataclass(frozen=True, slots=True)
class Ceilings:
    bytes_per_us: float
    flops_per_us: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--kv-dtype", nargs="+", choices=KV_DTYPES, default=["bf16"])
    parser.add_argument("--targets", action="store_true", help="only the shapes with a target")
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    record = Record("verify_attention", vars(arguments) | {"out": None}, arguments.out)
    loader = KernelLoader(torch.device("cuda"))
    attention, invariant = CudaAttention(loader), CudaInvariantAttention(loader)
    ceilings = Ceilings(copy_bytes_per_us(), matmul_flops_per_us())
    print(
        f"copy {ceilings.bytes_per_us / 1e6:.3f} TB/s, "
        f"bf16 matmul {ceilings.flops_per_us / 1e6:.0f} TFLOP/s",
        flush=True,
    )
    for shape in shapes(arguments):
        compare(attention, invariant, record, shape, ceilings, arguments)
    record.finish()
    return 0


def shapes(arguments: argparse.Namespace) -> Iterator[Shape]:
    kinds = arguments.kv_dtype
    if arguments.targets:
        for (batch, context, nodes, _), kind in product(TARGETS, kinds):
            yield Shape(batch, context, nodes, 8, kind)
        return
    lists = (arguments.heads, arguments.batches, arguments.contexts, arguments.nodes, kinds)
    for heads, batch, context, nodes, kind in product(*lists):
        yield Shape(batch, context, nodes, heads, kind)


def compare(
    attention: CudaAttention,
    invariant: CudaInvariantAttention,
    record: Record,
    shape: Shape,
    ceilings: Ceilings,
    arguments: argparse.Namespace,
) -> None:
    sets = input_sets(shape)
    ours = [ours_on(attention, inputs)[1] for inputs in sets]
    check(ours_on, attention, sets[0], shape)
    floor = max(shape.cache_bytes / ceilings.bytes_per_us, shape.flops / ceilings.flops_per_us)
    few = 10 if floor < 1000 else 2
    plans = [partial(schedule_of, attention, inputs) for inputs in sets]
    samples = {
        "us": graph_us(ours, replays=arguments.replays, at_least=few),
        "plan_us": graph_us(plans, replays=5, at_least=few),
    }
    if shape.kv_dtype == "bf16":
        check(invariant_on, invariant, sets[0], shape)
        alike = [invariant_on(invariant, inputs)[1] for inputs in sets]
        samples["invariant_us"] = graph_us(alike, replays=arguments.replays, at_least=few)
    if not arguments.no_rivals and shape.kv_dtype == "bf16":
        for name, rival in rivals(shape).items():
            calls = [rival(inputs) for inputs in sets[:8]]
            samples[name] = graph_us(calls, replays=5, at_least=min(few, 4))
    us = sorted(samples["us"])[len(samples["us"]) // 2]
    extra: dict[str, float | None] = {
        "gbps": shape.cache_bytes / us / 1e3,
        "tflops": shape.flops / us / 1e6,
        "copy_fraction": shape.cache_bytes / us / ceilings.bytes_per_us,
        "mma_fraction": shape.flops / us / ceilings.flops_per_us,
        "floor_us": floor,
    }
    target = targets().get((shape.batch, shape.context, shape.nodes))
    if target is not None and shape.heads == 8 and shape.kv_dtype == "bf16":
        extra["target_us"] = target
    params = {
        "heads": shape.heads,
        "nodes": shape.nodes,
        "context": shape.context,
        "batch": shape.batch,
        "kv_dtype": shape.kv_dtype,
    }
    record.add(params, samples, extra)


def targets() -> dict[tuple[int, int, int], float]:
    return {(batch, context, nodes): us for batch, context, nodes, us in TARGETS}


def input_sets(shape: Shape) -> list[Inputs]:
    number = min(MAX_SETS, max(2, -(-BEYOND_L2 // shape.cache_bytes)))
    number = max(1, min(number, MAX_BYTES // shape.cache_bytes))
    return [make_inputs(shape, seed) for seed in range(number)]


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Pages in random order; a tree in which every node's parent is any earlier one."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pages = -(-(shape.context + shape.nodes) // PAGE)
    order = torch.randperm(shape.batch * pages, generator=generator, device="cuda").int()
    cache = make_cache(shape.batch * pages, generator, shape.kv_dtype)
    query = torch.empty(shape.batch * shape.nodes, shape.heads, WIDTH, device="cuda")
    query = query.normal_(generator=generator).bfloat16()
    rng = np.random.default_rng(seed)
    words = ancestor_mask([-1] + [int(rng.integers(0, i)) for i in range(1, shape.nodes)])
    tree = torch.from_numpy(mask_to_bool(words[None], shape.nodes)[0]).cuda()
    mask = torch.from_numpy(words.view(np.int32)).cuda().repeat(shape.batch, 1, 1)
    rows = AttentionRows(
        row_start=shape.nodes * torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda"),
        num_cached=full(shape.batch, shape.context),
        num_known=full(shape.batch, 1),
        num_nodes=full(shape.batch, shape.nodes),
        page_table=order.view(shape.batch, pages),
        page_size=PAGE,
        mask=mask,
        rows_cap=shape.nodes,
    )
    return Inputs(query, cache, rows, tree)


def make_cache(pages: int, generator: torch.Generator, kv_dtype: str) -> Tensor:
    if kv_dtype == "bf16":
        rows = torch.empty(pages * PAGE, STRIDE, dtype=torch.bfloat16, device="cuda")
        return rows.normal_(generator=generator)[:, :WIDTH]
    rows = torch.empty(pages * PAGE, row_bytes(LATENT, ROPE), dtype=torch.uint8, device="cuda")
    for some in rows.split(1 << 16):
        numbers = torch.randn(len(some), WIDTH, generator=generator, device="cuda")
        some.copy_(quantised(numbers[:, :LATENT], numbers[:, LATENT:]))
    return rows


def full(size: int, value: int) -> Tensor:
    return torch.full((size,), value, dtype=torch.int32, device="cuda")


def ours_on(attention: CudaAttention, inputs: Inputs) -> tuple[Tensor, Call]:
    """What it writes, and one layer; the schedule is made once for all of them, so it is timed by
    itself."""
    out = torch.full_like(inputs.query[..., :LATENT], torch.nan).contiguous()
    schedule = schedule_of(attention, inputs)
    arguments = (out, inputs.query, inputs.cache, inputs.rows, schedule, SCALE)
    return out, partial(attention.attend, *arguments)


def invariant_on(attention: CudaInvariantAttention, inputs: Inputs) -> tuple[Tensor, Call]:
    out = torch.full_like(inputs.query[..., :LATENT], torch.nan).contiguous()
    paths = attention.plan(inputs.rows, *out.shape[:2])
    arguments = (out, inputs.query, inputs.cache, inputs.rows, paths, SCALE)
    return out, partial(attention.attend, *arguments)


def schedule_of(attention: CudaAttention, inputs: Inputs) -> AttentionSchedule:
    return attention.schedule(inputs.rows, inputs.query.dtype, inputs.query.shape[1])


def check(
    on: Callable[..., tuple[Tensor, Call]], attention: object, inputs: Inputs, shape: Shape
) -> None:
    """The first and the last request against float32."""
    out, run = on(attention, inputs)
    run()
    for r in {0, shape.batch - 1}:
        own = slice(r * shape.nodes, (r + 1) * shape.nodes)
        key = contiguous_keys(inputs, shape, slice(r, r + 1))[0].float()
        wanted = masked(inputs.query[own].float().flatten(0, 1)[None], key[None], inputs.tree)[0]
        found = out[own].float().flatten(0, 1)
        off = float((found - wanted).norm() / wanted.norm())
        if not off < BOUND:
            raise SystemExit(f"{type(attention).__name__} is wrong at {shape}: off by {off}")


def contiguous_keys(inputs: Inputs, shape: Shape, requests: slice) -> Tensor:
    """[r, context + N, C + D]"""
    table = inputs.rows.page_table[requests].long()
    rows = inputs.cache.unflatten(0, (-1, PAGE))[table].flatten(1, 2)
    rows = rows[:, : shape.context + shape.nodes]
    if not is_fp8(rows):
        return rows
    return dequantised(rows.flatten(0, 1), LATENT, ROPE).unflatten(0, rows.shape[:2])


def masked(query: Tensor, key: Tensor, tree: Tensor) -> Tensor:
    """query [r, N * H, C + D], key [r, S, C + D] -> [r, N * H, C]; tree [N, N] on the last keys."""
    nodes = tree.shape[0]
    scores = torch.bmm(query, key.transpose(1, 2)) * SCALE
    last = scores.view(len(query), nodes, -1, scores.shape[2])[..., -nodes:]
    last.masked_fill_(~tree[None, :, None], -torch.inf)
    return torch.bmm(scores.softmax(-1), key[..., :LATENT])


Rival = Callable[[Inputs], Call]


def rivals(shape: Shape) -> dict[str, Rival]:
    found: dict[str, Rival] = {}
    scores = shape.batch * shape.nodes * shape.heads * shape.context * 2
    if 4 * scores + shape.cache_bytes < MAX_BYTES:
        found["torch_us"] = partial(with_torch, shape)
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return found
    return found | {"flashinfer_us": partial(with_flashinfer, shape)}


def with_torch(shape: Shape, inputs: Inputs) -> Call:
    key = contiguous_keys(inputs, shape, slice(None))
    query = inputs.query.view(shape.batch, shape.nodes * shape.heads, WIDTH)
    return partial(masked, query, key, inputs.tree)


def with_flashinfer(shape: Shape, inputs: Inputs) -> Call:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend="fa2"
    )
    pages = inputs.rows.page_table.shape[1]
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda")
    lengths = full(shape.batch, shape.context + shape.nodes)
    wrapper.plan(
        starts * shape.nodes, starts * pages, inputs.rows.page_table.flatten(), lengths,
        shape.heads, LATENT, ROPE, PAGE, False, SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    cache = inputs.cache.unflatten(0, (-1, PAGE))
    parts = (inputs.query[..., :LATENT].contiguous(), inputs.query[..., LATENT:].contiguous())
    return partial(wrapper.run, *parts, cache[..., :LATENT], cache[..., LATENT:])


def matmul_flops_per_us(size: int = 8192) -> float:
    """Of a bf16 matrix product on random numbers."""
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    spans = sorted(graph_us([partial(torch.mm, a, b)], replays=10, at_least=3))
    return 2.0 * size**3 / spans[len(spans) // 2]


if __name__ == "__main__":
    sys.exit(main())
