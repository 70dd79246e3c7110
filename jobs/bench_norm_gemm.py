#!/usr/bin/env python3
"""Microseconds of queries from their latent, of a rank of Kimi K2.6: normed on the way, or before.

    python jobs/bench_norm_gemm.py --out benchmarks/results

once_us         norm and product in one launch (skinny_gemm_normed), in a CUDA graph
apart_us        the norm's launch, then the product's
product_us      the product alone
chain_once_us   in one launch, behind the product that makes the rows (qkv_down)
chain_apart_us  the same in two
torch_us        torch's product behind its norm, as once_us

Over copies of the matrices that together exceed L2. Each launch waits for the end of the one in
front, as in a layer; only a matrix's fetching overlaps. Two ways' bits are compared first.
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
from bench_gemm import MATRICES, weights_of
from gpu_timing import graph_us, need_gpu
from record import Record
from torch import Tensor

from kdray.kernels import cuda_norm_gemm, reference_gemm
from kdray.kernels.cuda import CudaOps
from kdray.model.layers import RmsNorm

DOWN, UP = (next(m for m in MATRICES if m.name == name) for name in ("qkv_down", "q_up"))
WIDTH = UP.shape.inputs
Way = Callable[[Tensor, Tensor], Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    record = Record("norm_gemm", vars(arguments) | {"out": None}, arguments.out)
    layers = Layers.of(CudaOps(torch.device("cuda")))
    for tokens in arguments.tokens:
        samples = {
            name: graph_us(calls, replays=arguments.replays, at_least=60)
            for name, calls in layers.calls(tokens).items()
        }
        record.add({"inputs": WIDTH, "outputs": UP.shape.outputs, "tokens": tokens}, samples)
    record.finish()
    return 0


@dataclass(frozen=True)
class Layers:
    """Matrices of as many layers as exceed L2, and one norm."""

    ops: CudaOps
    norm: RmsNorm
    matrices: Sequence[tuple[Tensor, Tensor]]  # down, up

    @classmethod
    def of(cls, ops: CudaOps) -> Layers:
        downs, ups = weights_of(DOWN), weights_of(UP)
        pairs = [(downs[i % len(downs)][0], up[0]) for i, up in enumerate(ups)]
        norm = RmsNorm.of(1 + 0.1 * torch.randn(WIDTH, device="cuda").bfloat16(), 1e-6)
        torch.cuda.synchronize()  # kernels fetch weights ahead of the launch in front
        return cls(ops, norm, pairs)

    def calls(self, tokens: int) -> dict[str, list[Callable[[], Tensor]]]:
        """Ways of a layer each, by the name of their time."""
        x = torch.randn(tokens, DOWN.shape.inputs, device="cuda").bfloat16()
        rows = self.ops.linear(x, self.matrices[0][0])[:, :WIDTH]
        up = self.matrices[0][1]
        if not cuda_norm_gemm.takes(self.ops._gemm, rows, self.norm, up):
            raise SystemExit(
                f"no one launch for {tokens} rows: ask for fewer, or see gemm_table.py"
            )
        if not torch.equal(self.once(rows, up), self.apart(rows, up)):
            raise SystemExit("one launch's bits are not those of two")

        def behind(way: Way, down: Tensor, up: Tensor) -> Tensor:
            return way(self.ops.linear(x, down)[:, :WIDTH], up)

        def alone(way: Way) -> list[Callable[[], Tensor]]:
            return [partial(way, rows, up) for _, up in self.matrices]

        return {
            "once_us": alone(self.once),
            "apart_us": alone(self.apart),
            "product_us": alone(self.ops.linear),
            "chain_once_us": [partial(behind, self.once, *pair) for pair in self.matrices],
            "chain_apart_us": [partial(behind, self.apart, *pair) for pair in self.matrices],
            "torch_us": alone(self.by_torch),
        }

    def once(self, rows: Tensor, up: Tensor) -> Tensor:
        return self.ops.norm_linear(rows, self.norm, up)

    def apart(self, rows: Tensor, up: Tensor) -> Tensor:
        return self.ops.linear(self.ops.rms_norm(rows, self.norm), up)

    def by_torch(self, rows: Tensor, up: Tensor) -> Tensor:
        return reference_gemm.norm_linear(rows, self.norm, up)


if __name__ == "__main__":
    sys.exit(main())
