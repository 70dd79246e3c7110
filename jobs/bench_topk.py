#!/usr/bin/env python3
"""Microseconds from logits to the K best tokens with their log-probs, on the GPU.

    python jobs/bench_topk.py --out benchmarks/results
    python jobs/bench_topk.py --sweep            # the kernel's own variants and deals, no rivals

graph_us        topk_logprob in a CUDA graph; every node has inputs of its own, together beyond L2
floor_us        the logits' bytes once, at the speed of a large copy measured in this run
torch_us        torch.topk and torch.logsumexp of the float32 logits, in a graph
flashinfer_us   flashinfer.top_k instead of torch.topk, where that package is installed

Every timed shape is compared with the reference first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_timing import Call, copy_bytes_per_us, graph_us, need_gpu
from record import Record
from torch import Tensor

from kdray.kernels.cuda_topk import CudaTopk
from kdray.kernels.loader import KernelLoader
from kdray.kernels.nvrtc import Defines
from kdray.kernels.reference import ReferenceOps

VOCAB = 163840
BEYOND_L2 = 160 << 20  # bytes of inputs between two uses of the same
MAX_SETS = 40
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROWS = (7, 56, 448, 960)
KINDS = ("normal", "peaky", "band", "rising")
VARIANTS: tuple[Defines, ...] = (
    {},
    {"AHEAD": 1},
    {"BLOCKS_PER_SM": 3},
    {"PREFETCH": 1, "BLOCKS_PER_SM": 3},
    {"FIRST_RANKING": 1, "SECOND_RANKING": 4},
    {"FIRST_RANKING": 2, "SECOND_RANKING": 1000},
    {"FIRST_RANKING": 6, "SECOND_RANKING": 14},
)
RUNS = {7: (1, 2), 56: (2, 3, 4), 448: (17, 20), 960: (20, 37, 49)}  # besides the launcher's choice
Rival = Callable[[Tensor, int], object]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--k", type=int, nargs="+", default=[16, 8, 32, 64])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--quick", action="store_true", help="k = 16 alone, fewer replays")
    parser.add_argument("--sweep", action="store_true", help="variants of the kernel, normal rows")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    name = "topk_variants" if arguments.sweep else "topk"
    config = vars(arguments) | {"out": None, "vocab": VOCAB}
    record, loader = Record(name, config, arguments.out), KernelLoader(torch.device("cuda"))
    bytes_per_us = copy_bytes_per_us()
    print(f"copy {bytes_per_us / 1e6:.3f} TB/s", flush=True)
    for dtype, rows in product(arguments.dtypes, arguments.rows):
        if arguments.sweep:
            sweep(loader, record, rows, dtype)
            continue
        for kind in arguments.kinds:
            inputs = input_sets(kind, rows, DTYPES[dtype])
            for k in [16] if arguments.quick else arguments.k:
                compare(loader, record, inputs, k, kind, bytes_per_us, arguments.quick)
    record.finish()
    return 0


def input_sets(kind: str, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Enough batches of logits that none is left in L2 when its turn comes again."""
    size = rows * VOCAB * dtype.itemsize
    number = min(MAX_SETS, max(2, -(-BEYOND_L2 // size)))
    generator = torch.Generator("cuda").manual_seed(rows)
    return [rows_of(kind, rows, generator).to(dtype) for _ in range(number)]


def rows_of(kind: str, rows: int, generator: torch.Generator) -> Tensor:
    """Normal logits; a few far above the rest; all within a few steps of bf16; ever rising."""
    if kind == "rising":
        return torch.linspace(-8, 8, VOCAB, device="cuda").repeat(rows, 1)
    normal = torch.randn(rows, VOCAB, generator=generator, device="cuda")
    if kind == "band":
        return 4 + 0.02 * normal
    if kind == "peaky":
        normal[:, :: VOCAB // 64] += 12
    return 2.5 * normal


def compare(
    loader: KernelLoader,
    record: Record,
    inputs: list[Tensor],
    k: int,
    kind: str,
    bytes_per_us: float,
    quick: bool,
) -> None:
    topk = CudaTopk(loader)
    ours = calls(topk.topk_logprob, inputs, k)
    check(ours[0], inputs[0], k)
    replays = 10 if quick else 30
    samples = {"graph_us": graph_us(ours, replays=replays, at_least=10)}
    if kind == "normal" or len(inputs[0]) == 56:
        for name, rival in rivals().items():
            samples[name] = graph_us(calls(rival, inputs[:10], k), replays=10, at_least=10)
    dtype = "bf16" if inputs[0].dtype == torch.bfloat16 else "fp32"
    record.add(
        {"rows": len(inputs[0]), "dtype": dtype, "k": k, "kind": kind, "vocab": VOCAB},
        samples,
        {"floor_us": inputs[0].nbytes / bytes_per_us},
    )


def sweep(loader: KernelLoader, record: Record, rows: int, dtype: str) -> None:
    inputs = input_sets("normal", rows, DTYPES[dtype])
    for variant in VARIANTS:
        if dtype == "fp32" and "BLOCKS_PER_SM" in variant:
            continue
        topk = CudaTopk(loader, variant)
        for run in (None, *RUNS.get(rows, ())):
            ours = calls(partial(topk.topk_logprob, run=run), inputs, 16)
            check(ours[0], inputs[0], 16)
            words = " ".join(f"{key}={value}" for key, value in variant.items()) or "default"
            record.add(
                {"rows": rows, "dtype": dtype, "run": run or "chosen", "variant": words},
                {"graph_us": graph_us(ours, replays=20, at_least=10)},
            )


def calls(op: Rival, inputs: Sequence[Tensor], k: int) -> list[Call]:
    return [partial(op, logits, k) for logits in inputs]


def check(op: Call, logits: Tensor, k: int) -> None:
    token, score = cast("tuple[Tensor, Tensor]", op())
    reference = ReferenceOps(logits.device).topk_logprob(logits[:64], k)
    if not torch.equal(token[:64], reference[0]):
        raise SystemExit(f"topk_logprob is wrong: tokens at {logits.shape} {logits.dtype} {k=}")
    if (score[:64] - reference[1]).abs().max().item() > 16:  # its log-sum-exp is float32
        raise SystemExit(f"topk_logprob is wrong: scores at {logits.shape} {logits.dtype} {k=}")


def rivals() -> dict[str, Rival]:
    found: dict[str, Rival] = {"torch_us": torch_topk}
    try:
        import flashinfer
    except ImportError:
        return found

    def with_flashinfer(logits: Tensor, k: int) -> object:
        return flashinfer.top_k(logits, k, sorted=True), logits.float().logsumexp(dim=1)

    return found | {"flashinfer_us": with_flashinfer}


def torch_topk(logits: Tensor, k: int) -> object:
    return logits.topk(k, dim=1), logits.float().logsumexp(dim=1)


if __name__ == "__main__":
    sys.exit(main())
