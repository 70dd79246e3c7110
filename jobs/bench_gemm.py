#!/usr/bin/env python3
"""Microseconds of products of few rows by a rank's matrices of Kimi K2.6, beside torch's.

    python jobs/bench_gemm.py --out benchmarks/results

graph_us       in a CUDA graph, over copies of the matrix that together exceed L2
torch_us       torch's call (and its swiglu for gate and up), in such a graph
floor_us       the matrix and the rows read, and the product written, at the speed of a large copy
               measured in this run
copy_fraction  floor_us / graph_us

Calls do not read one another's results, yet each waits for the end of the one in front, as in a
layer; only a matrix's fetching overlaps. Results are compared with torch's first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_timing import copy_bytes_per_us, graph_us, need_gpu
from record import Record
from torch import Tensor

from kdray.kernels import reference_gemm
from kdray.kernels.cuda_fused import CudaFused
from kdray.kernels.cuda_gemm import CudaGemm
from kdray.kernels.gemm_plan import GemmShape
from kdray.kernels.loader import KernelLoader

Made = Tensor | tuple[Tensor, ...]
TOKENS = (1, 4, 8, 9, 16, 17, 32, 33, 64)
COLD_BYTES = 256 << 20
MOST_SETS = 64


@dataclass(frozen=True)
class Matrix:
    """One of a layer's matrices; `gated`: gate and up, with the SwiGLU behind them; `beside`: of
    its last outputs so many are such a gated matrix of their own, in the same launch."""

    name: str
    shape: GemmShape
    dtype: torch.dtype = torch.bfloat16
    gated: bool = False
    beside: int = 0

    @property
    def num_bytes(self) -> int:
        return 2 * self.shape.inputs * self.shape.outputs * self.shape.heads

    def moved(self, tokens: int) -> int:
        numbers = (self.shape.outputs - self.beside) // (1 + self.gated) * self.dtype.itemsize
        row = 2 * self.shape.inputs + numbers + self.beside  # half as many, of 2 bytes
        return self.num_bytes + tokens * self.shape.heads * row


MATRICES = (
    Matrix("qkv_down", GemmShape(7168, 2112)),
    Matrix("q_up", GemmShape(1536, 1536)),
    Matrix("attention_out", GemmShape(1024, 7168)),
    Matrix("router", GemmShape(7168, 384), torch.float32),
    Matrix("router_shared", GemmShape(7168, 896), torch.float32, beside=512),
    Matrix("shared_up", GemmShape(7168, 512)),
    Matrix("shared_gated", GemmShape(7168, 512), gated=True),
    Matrix("shared_down", GemmShape(256, 7168)),
    Matrix("head", GemmShape(7168, 20480), torch.float32),
    Matrix("key_up", GemmShape(128, 512, 8)),
    Matrix("value_up", GemmShape(512, 128, 8)),
)
NAMES = tuple(matrix.name for matrix in MATRICES)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--matrices", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--no-rival", action="store_true", help="ours alone")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    record = Record("gemm", vars(arguments) | {"out": None}, arguments.out)
    loader, speed = KernelLoader(torch.device("cuda")), copy_bytes_per_us()
    gemm = CudaGemm(loader)
    for matrix in MATRICES:
        if matrix.name not in arguments.matrices:
            continue
        weights = weights_of(matrix)
        for tokens in arguments.tokens:
            x = rows_of(matrix, tokens)
            ours = [product(gemm, matrix, x, weight) for weight in weights]
            theirs = [by_torch(CudaFused(loader), matrix, x, weight) for weight in weights]
            compare(matrix, ours[0](), theirs[0]())
            nodes = 20 if matrix.num_bytes > COLD_BYTES else 60
            samples = {"graph_us": graph_us(ours, replays=arguments.replays, at_least=nodes)}
            if not arguments.no_rival:
                samples["torch_us"] = graph_us(theirs, replays=arguments.replays, at_least=nodes)
            floor = matrix.moved(tokens) / speed
            best = sorted(samples["graph_us"])[len(samples["graph_us"]) // 2]
            params = {
                "matrix": matrix.name,
                "outputs": matrix.shape.outputs,
                "inputs": matrix.shape.inputs,
                "heads": matrix.shape.heads,
                "tokens": tokens,
            }
            record.add(params, samples, {"floor_us": floor, "copy_fraction": floor / best})
    record.finish()
    return 0


def weights_of(matrix: Matrix) -> list[Tensor]:
    """Copies [heads, in, out] that together exceed L2, an output's weights side by side."""
    shape = matrix.shape
    sets = min(MOST_SETS, -(-COLD_BYTES // matrix.num_bytes))
    size = (sets, shape.heads, shape.outputs, shape.inputs)
    drawn = torch.randn(size[1:], device="cuda").mul_(shape.inputs**-0.5).bfloat16()
    weights = drawn.expand(size).contiguous()
    torch.cuda.synchronize()  # kernels fetch weights ahead of the launch in front
    return list(weights.mT.unbind())


def rows_of(matrix: Matrix, tokens: int) -> Tensor:
    return torch.randn(tokens, matrix.shape.heads, matrix.shape.inputs, device="cuda").bfloat16()


def product(gemm: CudaGemm, matrix: Matrix, x: Tensor, weight: Tensor) -> Callable[[], Made]:
    if matrix.shape.heads > 1:
        return lambda: gemm.per_head(x, weight)
    rows, whole = x[:, 0], weight[0]
    if matrix.beside:
        plain, gate_up = whole.tensor_split([-matrix.beside], dim=1)
        return lambda: gemm.linear_and_gated(rows, plain, gate_up, dtype=matrix.dtype)
    if matrix.gated:
        return lambda: gemm.gated_linear(rows, whole)
    return lambda: gemm.linear(rows, whole, dtype=matrix.dtype)


def by_torch(fused: CudaFused, matrix: Matrix, x: Tensor, weight: Tensor) -> Callable[[], Made]:
    if matrix.shape.heads > 1:
        return lambda: fused.per_head(x, weight)
    rows, whole = x[:, 0], weight[0]
    if matrix.beside:
        plain, gate_up = whole.tensor_split([-matrix.beside], dim=1)
        linear = partial(reference_gemm.linear, rows, plain, dtype=matrix.dtype)
        return lambda: (linear(), fused.swiglu(rows @ gate_up))
    if matrix.gated:
        return lambda: fused.swiglu(rows @ whole)
    return lambda: reference_gemm.linear(rows, whole, dtype=matrix.dtype)


def compare(matrix: Matrix, ours: Made, theirs: Made) -> None:
    parts = ((made,) if isinstance(made, Tensor) else made for made in (ours, theirs))
    for found, wanted in zip(*parts, strict=True):
        if (found.double() - wanted.double()).norm() > 0.01 * wanted.double().norm():
            raise SystemExit(f"{matrix.name} differs from torch")


if __name__ == "__main__":
    sys.exit(main())
