"""Launches skinny_gemm.cu, skinny_gemm_pair.cu: up to 128 rows of bf16 times a matrix or two.

What it does not take (other dtypes, more rows, a matrix whose inputs do not lie side by side) runs
by reference_gemm.py, which is the library's call. Nothing waits for the device; all may be captured
in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from kdray.kernels.gemm_table import pair_plan_for, plan_for
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
        self.plan = plan
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
        if not takes_gated(x, gate_up):
            return reference_gemm.gated_linear(x, gate_up)
        out = x.new_empty(len(x), gate_up.shape[1] // 2)
        self._launch(out[:, None], x[:, None], gate_up[None], None, gated=True)
        return out

    def linear_and_gated(
        self, x: Tensor, weight: Tensor, gate_up: Tensor, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """One launch where both matrices are of as many runs."""
        dtype = x.dtype if dtype is None else dtype
        plan = self._pair_plan(x, weight, gate_up) if dtype in OUT_DTYPES else None
        if plan is None:
            return self.linear(x, weight, dtype=dtype), self.gated_linear(x, gate_up)
        outputs, inner = weight.shape[1], gate_up.shape[1] // 2
        out = torch.empty(len(x), outputs, dtype=dtype, device=x.device)
        gates = x.new_empty(len(x), inner)
        cut = Cut(plan, _joined(plan, weight, gate_up), len(x))
        self.start(
            "skinny_gemm_pair",
            pair_defines(plan, cut.tiles, cut.shape.steps, cut.groups, dtype),
            cut,
            (out, gates, x, weight, gate_up),
            (x.shape[1], outputs, inner, x.stride(0), weight.stride(1), gate_up.stride(1)),
        )
        return out, gates

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
        heads, inputs, outputs = weight.shape
        shape = GemmShape(inputs, outputs, heads)
        cut = Cut(self.plan or plan_for(shape, token_tiles_for(len(x))), shape, len(x))
        strides = (
            *(x.stride(0), x.stride(1)),
            *(weight.stride(2), weight.stride(0)),
            *(out.stride(0), out.stride(1)),
        )
        self.start(
            "skinny_gemm",
            defines(cut.plan, cut.tiles, shape.steps, cut.groups, gated, out.dtype),
            cut,
            (out, x, weight, add),
            (inputs, outputs, *strides),
        )

    def start(
        self,
        name: str,
        defines: dict[str, str | int],
        cut: Cut,
        arrays: tuple[Tensor | None, ...],
        sizes: tuple[int, ...],
        *,
        slices: int = 0,
    ) -> None:
        """A kernel that multiplies as skinny_gemm.cu does; arrays come before the workspace and the
        number of rows, sizes behind. slices: of the grid, behind those of the heads."""
        words = work_words(cut.shape, cut.tiles, cut.plan, cut.groups)
        work = self._workspace(words, self.device) if words else None
        self._loader.get(name, name, defines).launch(
            (*cut.grid[:2], cut.grid[2] + slices),
            WARP * cut.plan.warps,
            (*arrays, work, cut.tokens, *sizes),
            shared_bytes=shared_bytes(cut.plan, cut.tiles, cut.shape.steps),
            overlap=True,
        )

    def _pair_plan(self, x: Tensor, weight: Tensor, gate_up: Tensor) -> GemmPlan | None:
        """None where one launch cannot do it."""
        if not takes(x, weight) or not takes_gated(x, gate_up):
            return None
        first, second = (GemmShape(*matrix.shape) for matrix in (weight, gate_up))
        tiles = token_tiles_for(len(x))
        plan = self.plan or pair_plan_for(first, second, tiles)
        if plan is None:
            return None
        words = work_words(_joined(plan, weight, gate_up), tiles, plan, MOST_GROUPS)
        return plan if words <= WORK_WORDS else None

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


@dataclass(frozen=True, slots=True)
class Cut:
    """A launch: its plan, the matrix (two: joined) it is a plan of, and the rows of x."""

    plan: GemmPlan
    shape: GemmShape
    tokens: int

    @property
    def tiles(self) -> int:
        return token_tiles_for(self.tokens)

    @property
    def groups(self) -> int:
        return -(-self.tokens // (TOKEN_TILE * self.tiles))

    @property
    def grid(self) -> tuple[int, int, int]:
        pieces = self.groups * -(-self.shape.outputs // self.plan.rows)
        split, heads = self.plan.split, self.shape.heads
        return (pieces, split, heads) if self.tiles == 1 else (split, pieces, heads)


def _joined(plan: GemmPlan, *matrices: Tensor) -> GemmShape:
    """Matrices [in, out] below one another, each of whole blocks."""
    blocks = sum(-(-matrix.shape[1] // plan.rows) for matrix in matrices)
    return GemmShape(matrices[0].shape[0], blocks * plan.rows)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether skinny_gemm.cu takes x [T, in] @ weight [in, out]."""
    return x.dim() == 2 and weight.dim() == 2 and takes_heads(x[:, None], weight[None], None)


def takes_gated(x: Tensor, gate_up: Tensor) -> bool:
    """The same of a gated product, whose halves are whole vectors each."""
    return takes(x, gate_up) and gate_up.shape[1] % (2 * VECTOR) == 0


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


@cache
def pair_defines(
    plan: GemmPlan, token_tiles: int, steps: int, groups: int, dtype: torch.dtype
) -> dict[str, str | int]:
    """What skinny_gemm_pair.cu is compiled with: the second product is gated, the first is not."""
    found = defines(plan, token_tiles, steps, groups, False, dtype)
    return {name: value for name, value in found.items() if name != "GATED"}


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
