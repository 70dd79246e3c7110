"""Launches skinny_gemm_normed.cu: the norm of a few rows, and their product, at once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kdray.kernels import cuda_fused
from kdray.kernels.cuda_gemm import WARP, CudaGemm, Cut, defines
from kdray.kernels.cuda_gemm import takes as takes_product
from kdray.kernels.gemm_plan import (
    STEP,
    TOKEN_TILE,
    GemmPlan,
    GemmShape,
    chunk_of,
    shared_bytes,
    static_bytes,
)
from kdray.kernels.gemm_table import plan_for
from kdray.kernels.loader import MAX_BLOCK_BYTES
from kdray.kernels.ops import Norm

MOST_ROWS = TOKEN_TILE  # above, blocks would read more of x than the norm's launch costs
MOST_WIDTH = 4096  # a vector a thread of rms_norm.cu's; as in the .cuh file


def takes(gemm: CudaGemm, x: Tensor, norm: Norm, weight: Tensor) -> bool:
    """Whether both kernels take these, of a matrix whose plan lets one launch do it."""
    return (
        0 < len(x) <= MOST_ROWS
        and x.dtype == torch.bfloat16
        and takes_product(x, weight)
        and cuda_fused.takes_norm(x, norm)
        and is_whole(_plan(gemm, GemmShape(*weight.shape)), weight.shape[0])
    )


def norm_linear(gemm: CudaGemm, x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
    """As in Ops, for what `takes` allows."""
    shape = GemmShape(*weight.shape)
    cut = Cut(_plan(gemm, shape), shape, len(x))
    out = x.new_empty(len(x), shape.outputs)
    gemm.start(
        "skinny_gemm_normed",
        normed_defines(cut.plan, shape.inputs),
        cut,
        (out, x, weight, norm.weight, norm.eps),
        (shape.outputs, x.stride(0), weight.stride(1), out.stride(0)),
    )
    return out


def _plan(gemm: CudaGemm, shape: GemmShape) -> GemmPlan:
    return gemm.plan or plan_for(shape, 1)


@cache
def is_whole(plan: GemmPlan, width: int) -> bool:
    """Whether a block has whole rows at once, and as many warps as rms_norm.cu takes for one."""
    steps = width // STEP
    parts = int(cuda_fused.norm_defines(width, torch.bfloat16)["THREADS"]) // WARP
    sums = -(-4 * TOKEN_TILE * parts // 128) * 128
    whole = shared_bytes(plan, 1, steps) + max(static_bytes(plan, 1), sums)
    return (
        plan.split == 1
        and -(-steps // plan.runs) <= chunk_of(plan, 1, steps)
        and width <= MOST_WIDTH
        and parts <= plan.warps
        and whole <= MAX_BLOCK_BYTES
    )


@cache
def normed_defines(plan: GemmPlan, width: int) -> dict[str, str | int]:
    """What skinny_gemm_normed.cu is compiled with."""
    product = defines(plan, 1, width // STEP, 1, False, torch.bfloat16)
    unsaid = ("GATED", "OUT_FP32")
    return {name: value for name, value in product.items() if name not in unsaid} | {"WIDTH": width}
