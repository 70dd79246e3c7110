"""Launches skinny_gemm.cu: up to 128 rows of bf16 times a matrix.

What it does not take (other dtypes, more rows, a matrix whose inputs do not lie side by side) runs
by reference_gemm.py, which is the library's call. Nothing waits for the device; all may be captured
in a graph.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kdray.kernels import reference_gemm
from kdray.kernels.gemm_plan import (
    MOST_GROUPS,
    STEP,
    TOKEN_TILE,
    WORK_WORDS,
    GemmPlan,
    GemmShape,
    chunk_of,
    shared_bytes,
    token_tiles_for,
    work_words,
)
from kdray.kernels.gemm_table import plan_for
from kdray.kernels.loader import KernelLoader

WARP = 32
VECTOR = 8  # bf16 numbers in 16 bytes
MOST_TOKENS = 64 * MOST_GROUPS
OUT_DTYPES = (torch.bfloat16, torch.float32)
EMPTY = -1  # a word of the workspace that holds nothing


class CudaGemm:
    """The op on one device. Its workspace serves one launch at a time: use it on one stream.

    Weights are fetched before the launch in front has ended: that one must not write them.
    """

    def __init__(self, loader: KernelLoader, *, plan: GemmPlan | None = None) -> None:
        """plan: instead of the table's, for measuring."""
        self._loader = loader
        self.device = loader.device
        self._plan = plan
        self._work: Tensor | None = None

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        dtype: torch.dtype | None = None,
        add: Tensor | None = None,
    ) -> Tensor:
        dtype = x.dtype if dtype is None else dtype
        if dtype not in OUT_DTYPES or not takes(x, weight):
            return reference_gemm.linear(x, weight, dtype=dtype, add=add)
        out = torch.empty(len(x), weight.shape[1], dtype=dtype, device=x.device)
        if add is not None and not _alike(add, out):
            return reference_gemm.linear(x, weight, dtype=dtype, add=add)
        self._launch(out[:, None], x[:, None], weight[None], add, gated=False)
        return out

    def gated_linear(self, x: Tensor, gate_up: Tensor) -> Tensor:
        if not takes(x, gate_up) or gate_up.shape[1] % (2 * VECTOR):
            return reference_gemm.gated_linear(x, gate_up)
        out = x.new_empty(len(x), gate_up.shape[1] // 2)
        self._launch(out[:, None], x[:, None], gate_up[None], None, gated=True)
        return out

    def per_head(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """As in Ops, for what takes_heads allows."""
        if out is None:
            out = x.new_empty(*x.shape[:2], weight.shape[2])
        self._launch(out, x, weight, None, gated=False)
        return out

    def _launch(
        self, out: Tensor, x: Tensor, weight: Tensor, add: Tensor | None, *, gated: bool
    ) -> None:
        """out [T, H, B], x [T, H, A], weight [H, A, B], whose A lie side by side."""
        tokens, (heads, inputs, outputs) = len(x), weight.shape
        shape, tiles = GemmShape(inputs, outputs, heads), token_tiles_for(tokens)
        plan = self._plan or plan_for(shape, tiles)
        groups = -(-tokens // (TOKEN_TILE * tiles))
        across = -(-outputs // plan.rows)
        kernel = self._loader.get(
            "skinny_gemm",
            "skinny_gemm",
            defines(plan, tiles, shape.steps, groups, gated, out.dtype),
        )
        words = work_words(shape, tiles, plan, groups)
        work = self._workspace(words, x.device) if words else None
        strides = (
            *(x.stride(0), x.stride(1)),
            *(weight.stride(2), weight.stride(0)),
            *(out.stride(0), out.stride(1)),
        )
        pieces = groups * across
        grid = (pieces, plan.split, heads) if tiles == 1 else (plan.split, pieces, heads)
        kernel.launch(
            grid,
            WARP * plan.warps,
            (out, x, weight, add, work, tokens, inputs, outputs, *strides),
            shared_bytes=shared_bytes(plan, tiles, shape.steps),
            overlap=True,
        )

    def _workspace(self, words: int, device: torch.device) -> Tensor:
        """All words empty, as every launch leaves them."""
        if self._work is None:
            self._work = torch.full((WORK_WORDS,), EMPTY, dtype=torch.int32, device=device)
        if words > self._work.numel():
            raise ValueError(
                f"sums of {words} words in parts, and the workspace has {self._work.numel()}; "
                "give this shape a plan of fewer blocks over inputs (gemm_table.py)"
            )
        return self._work


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether skinny_gemm.cu takes x [T, in] @ weight [in, out]."""
    return x.dim() == 2 and weight.dim() == 2 and takes_heads(x[:, None], weight[None], None)


def takes_heads(x: Tensor, weight: Tensor, out: Tensor | None) -> bool:
    """Whether it takes x [T, H, A], weight [H, A, B] -> out [T, H, B]."""
    if x.dtype != torch.bfloat16 or any(t.dtype != x.dtype for t in (weight, out) if t is not None):
        return False
    if x.device != weight.device or not 0 < len(x) <= MOST_TOKENS:
        return False
    _, inputs, outputs = weight.shape
    sizes = inputs > 0 and inputs % STEP == 0 and outputs > 0 and outputs % VECTOR == 0
    sides = x.stride(2) == 1 and weight.stride(1) == 1 and (out is None or out.stride(2) == 1)
    wide = (weight.shape[0] == 1 or weight.stride(0) % VECTOR == 0) and (
        outputs == 1 or weight.stride(2) % VECTOR == 0
    )
    return (
        sizes
        and sides
        and wide
        and _in_steps(x, VECTOR)
        and (out is None or _in_steps(out, VECTOR // 2))
        and weight.data_ptr() % 16 == 0
    )


@cache
def defines(
    plan: GemmPlan, token_tiles: int, steps: int, groups: int, gated: bool, dtype: torch.dtype
) -> dict[str, str | int]:
    """What skinny_gemm.cu is compiled with."""
    return {
        "TOKEN_TILES": token_tiles,
        "ROW_TILES": plan.row_tiles,
        "WARPS_M": plan.warps_m,
        "WARPS_K": plan.warps_k,
        "SPLIT": plan.split,
        "SLOTS": plan.slots,
        "GROUPS": groups,
        "CHUNK": chunk_of(plan, token_tiles, steps),
        "GATED": int(gated),
        "OUT_FP32": int(dtype == torch.float32),
    }


def _in_steps(x: Tensor, unit: int) -> bool:
    """Whether rows and heads of [T, H, ..] start on multiples of `unit` numbers."""
    steps = [step for size, step in zip(x.shape[:2], x.stride()[:2], strict=True) if size > 1]
    return x.data_ptr() % (unit * x.element_size()) == 0 and all(s % unit == 0 for s in steps)


def _alike(add: Tensor, out: Tensor) -> bool:
    return (
        add.shape == out.shape
        and add.dtype == out.dtype
        and add.device == out.device
        and add.is_contiguous()
        and add.data_ptr() % 16 == 0
    )
