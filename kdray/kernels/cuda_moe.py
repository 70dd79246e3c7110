"""Launches sort_rows.cu and moe_w4a16.cu: a layer's routed experts, weights INT4.

Rows that are very few or many go to kernels of their own, of the same bits.

Nothing waits for the device; all may be captured in a graph.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kdray.kernels.cuda_moe_few import CudaMoeFew
from kdray.kernels.cuda_moe_many import CudaMoeMany
from kdray.kernels.loader import KernelLoader, processors_of
from kdray.kernels.moe_design import (
    DESIGN,
    MAX_TOP_K,
    THREADS,
    UNIT_COLUMNS,
    Design,
    moe_defines,
)
from kdray.kernels.moe_layout import TILE, PackedExperts

# As in the .cu files.
SORT_THREADS, SUM_THREADS, SUM_COLUMNS = 1024, 128, 8
MAX_EXPERTS = 1024

MAX_ROWS = 2048  # of a launch, which bounds the memory between its halves
MAX_TILES = MAX_EXPERTS + MAX_ROWS * MAX_TOP_K // 32  # the narrower, the fewer pairs there are
READY_INTS = 32
# Weights are unpacked once for many rows from as many rows on, and as many pairs an expert, on
# average; the bits are the same. Of 384 experts 1,024 rows (21 pairs) took 8 % less, 512 (11) 24 %
# more; of 64 experts steps of 256 rows (32) took as long, of 512 (64) 9 to 13 % less.
MANY_ROWS, PAIRS_FOR_MANY = 512, 21
FEW_ROWS = 2  # up to which one launch does it all; the bits are the same
# Pairs an expert, on average, from which tiles are of 16 rows, and of 32.
PAIRS_FOR_TWO, PAIRS_FOR_FOUR = 4, 12


class SortedPairs(NamedTuple):
    """As sort_rows.cu leaves them; what lies behind num_tiles means nothing.

    tile [at most, 4] int32, pair [P] int32, num_tiles [1] int32
    """

    tile: Tensor
    pair: Tensor
    num_tiles: Tensor


class CudaMoe:
    """The op on one device. Its workspace serves one launch at a time: use it on one stream."""

    def __init__(
        self,
        loader: KernelLoader,
        *,
        overlap: bool = True,
        design: Design = DESIGN,
        many: bool | None = None,
        few_rows: int = FEW_ROWS,
    ) -> None:
        """few_rows: up to which a kernel of their own takes them; many: whether the kernel for many
        rows takes all others, None: where it is faster.

        overlap: let a launch start while the kernel before it ends. Its blocks wait for one
        another, and come to be resident: what is in front ends without them, and what is behind
        starts when they all have. Otherwise, for measuring, as other designs are, the launch is
        cooperative.
        """
        self._loader = loader
        self._design = design
        self._launch = {"overlap": True} if overlap else {"cooperative": True}
        self._processors = processors_of(loader.device)
        self._takes_many = many
        self.many = CudaMoeMany(loader, self._processors)
        self._few_rows = few_rows
        self.few = CudaMoeFew(loader, self._processors, self._launch)
        self._ready = torch.zeros(MAX_TILES, READY_INTS, dtype=torch.int32, device=loader.device)

    def moe_w4a16(
        self, x: Tensor, expert: Tensor, weight: Tensor, experts: PackedExperts, shared: Tensor
    ) -> Tensor:
        """As in Ops, for what `takes` takes."""
        if len(x) <= MAX_ROWS:
            return self._run(x, expert, weight, experts, shared)
        pieces = [slice(i, i + MAX_ROWS) for i in range(0, len(x), MAX_ROWS)]
        return torch.cat(
            [self._run(x[p], expert[p], weight[p], experts, shared[p]) for p in pieces]
        )

    def sort_rows(self, expert: Tensor, num_experts: int, column_tiles: int) -> SortedPairs:
        """expert [T, k] int64."""
        pairs, tile_rows = expert.numel(), UNIT_COLUMNS * column_tiles
        most = min(pairs, num_experts + pairs // tile_rows)
        device = expert.device
        found = SortedPairs(
            torch.empty((most, 4), dtype=torch.int32, device=device),
            torch.empty(pairs, dtype=torch.int32, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
        )
        kernel = self._loader.get("sort_rows", "sort_rows", sort_defines(num_experts, column_tiles))
        kernel.launch(
            1,
            SORT_THREADS,
            (*found, expert, pairs),
            shared_bytes=sort_bytes(num_experts),
            overlap=True,
        )
        return found

    def _run(
        self, x: Tensor, expert: Tensor, weight: Tensor, experts: PackedExperts, shared: Tensor
    ) -> Tensor:
        rows, top_k = expert.shape
        if rows == 0:
            return torch.empty_like(x)
        takes_many = self._takes_many
        if takes_many is None:
            takes_many = rows >= rows_for_many(experts.num_experts, top_k)
        if takes_many:
            return self.many.moe_w4a16(x, expert, weight, experts, shared)
        if rows <= self._few_rows and self.few.takes(rows, top_k, experts):
            return self.few.moe_w4a16(x, expert, weight, experts, shared)
        return self._by_two_launches(x, expert, weight, experts, shared)

    def _by_two_launches(
        self, x: Tensor, expert: Tensor, weight: Tensor, experts: PackedExperts, shared: Tensor
    ) -> Tensor:
        (rows, width), top_k = x.shape, expert.shape[1]
        out = torch.empty_like(x)
        inner = x.new_empty(rows * top_k, experts.inner)
        partial = x.new_empty(rows * top_k, width)
        tiles = column_tiles(rows * top_k, experts.num_experts)
        order = self._order(expert, experts.num_experts, tiles)
        defines = moe_defines(width, experts.inner, top_k, tiles, self._design)
        multiply = self._loader.get("moe_w4a16", "moe_w4a16", defines)
        weights = (experts.gate_up, experts.down)
        most_tiles = rows * top_k if order[0] is None else len(order[0])
        multiply.launch(
            self._processors,
            THREADS,
            (inner, partial, self._ready, x, *weights, expert, *order, most_tiles, rows * top_k),
            shared_bytes=self._design.shared_bytes,
            **self._launch,
        )
        add = self._loader.get("moe_w4a16", "moe_sum", defines)
        add.launch(
            (rows, -(-width // (SUM_THREADS * SUM_COLUMNS))),
            SUM_THREADS,
            (out, self._ready, partial, weight, shared, most_tiles),
            overlap=True,
        )
        return out

    def _order(
        self, expert: Tensor, num_experts: int, tiles: int
    ) -> SortedPairs | tuple[None, None, None]:
        """Sorted, but where that is left to the product's blocks."""
        if tiles == 1 and self._design.sorts(*expert.shape):
            return None, None, None
        return self.sort_rows(expert, num_experts, tiles)


def rows_for_many(num_experts: int, top_k: int) -> int:
    """From which moe_w4a16_many is faster."""
    return max(MANY_ROWS, -(-PAIRS_FOR_MANY * num_experts // top_k))


def column_tiles(pairs: int, num_experts: int) -> int:
    """Eights of rows that a tile holds. It never changes a result."""
    if pairs < PAIRS_FOR_TWO * num_experts:
        return 1
    return 2 if pairs < PAIRS_FOR_FOUR * num_experts else 4


@cache
def sort_defines(num_experts: int, column_tiles: int) -> dict[str, str | int]:
    return {"NUM_EXPERTS": num_experts, "TILE_ROWS": UNIT_COLUMNS * column_tiles}


def sort_bytes(num_experts: int) -> int:
    """Counts of 16 bits, a warp and expert each."""
    return 2 * SORT_THREADS // 32 * num_experts


def takes(
    x: Tensor, expert: Tensor, weight: Tensor, experts: PackedExperts, shared: Tensor
) -> bool:
    bf16 = x.dtype == shared.dtype == torch.bfloat16 and weight.dtype == torch.float32
    placed = (x, expert, weight, shared, experts.gate_up, experts.down)
    packed = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in placed)
    shaped = x.shape == shared.shape and expert.shape == weight.shape and experts.width % TILE == 0
    fits = experts.num_experts <= MAX_EXPERTS and expert.shape[1] <= MAX_TOP_K
    return bf16 and packed and shaped and fits and expert.dtype == torch.int64
