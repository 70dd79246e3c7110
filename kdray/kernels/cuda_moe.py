"""Launches sort_rows.cu and moe_w4a16.cu: a layer's routed experts, weights INT4.

Nothing waits for the device; all may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kdray.kernels.cuda_moe_few import CudaMoeFew
from kdray.kernels.cuda_moe_many import CudaMoeMany
from kdray.kernels.loader import KernelLoader, processors_of
from kdray.kernels.moe_layout import STEP_BYTES, TILE, PackedExperts

# As in the .cu files.
WARPS = 16
THREADS = WARPS * 32
SORT_THREADS, SUM_THREADS, SUM_COLUMNS = 1024, 128, 8
MAX_EXPERTS = 1024
MAX_TOP_K = 32
MAX_UNSORTED, MAX_UNSORTED_BY_WARP = 128, 32  # pairs that a block, a warp sorts for itself
UNIT_COLUMNS = 8

MAX_ROWS = 2048  # of a launch, which bounds the memory between its halves
MAX_TILES = MAX_EXPERTS + MAX_ROWS * MAX_TOP_K // 32  # the narrower, the fewer pairs there are
READY_INTS = 32
MANY_ROWS = 1024  # from which weights are unpacked once for many rows; the bits are the same
FEW_ROWS = 0  # up to which one launch does it all; the bits are the same
# Pairs an expert, on average, from which tiles are of 16 rows, and of 32.
PAIRS_FOR_TWO, PAIRS_FOR_FOUR = 4, 12


@dataclass(frozen=True, slots=True)
class Design:
    """How a block works, which never changes a result.

    slot_steps, slots   of a warp's ring of weights
    parts               buffers to add up in
    list_bytes          for the order of the pairs, which else stays in global memory
    by_lanes            weights are copied by the lanes, not by the copy engine; the widest tiles
                        have no registers for it
    catch_up            blocks with less of the first half begin the second before the others
    """

    slot_steps: int = 2
    slots: int = 3
    parts: int = 2
    list_bytes: int = 10_240
    by_lanes: bool = True
    catch_up: bool = True

    @property
    def shared_bytes(self) -> int:
        slot = self.slot_steps * STEP_BYTES + 8  # its barrier
        return (
            WARPS * (self.slots * slot + self.parts * 8 * 32 * 4)
            + self.list_bytes
            + self.parts * 16  # two barriers each
            + 32  # a constant, a counter
        )

    def sorts(self, rows: int, top_k: int) -> bool:
        """Whether a block sorts a step's pairs for itself, where tiles hold 8 rows."""
        if self.list_bytes >= 8 * MAX_UNSORTED + 16:
            return rows * top_k <= MAX_UNSORTED
        return rows * top_k <= MAX_UNSORTED_BY_WARP and rows <= UNIT_COLUMNS


DESIGN = Design()
# A unit of the second half fits a warp's slots, so that all its weights come before its rows do.
FEW_DESIGN = Design(slots=4, parts=1)


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
        many_rows: int = MANY_ROWS,
        few_rows: int = FEW_ROWS,
        few_design: Design = FEW_DESIGN,
        switches: Mapping[str, str | int] | None = None,
    ) -> None:
        """overlap: let a launch start while the kernel before it ends. Its blocks wait for one
        another, and come to be resident: what is in front ends without them, and what is behind
        starts when they all have. Otherwise, for measuring, as other designs are, the launch is
        cooperative.
        """
        self._loader = loader
        self._design = design
        self._launch = {"overlap": True} if overlap else {"cooperative": True}
        self._processors = processors_of(loader.device)
        self._many_rows = many_rows
        self.many = CudaMoeMany(loader, self._processors)
        self._few_rows, self._few_design = few_rows, few_design
        self._switches = dict(switches or {})
        self._few = CudaMoeFew(loader, self._processors, MAX_TOP_K)
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
        if 0 < len(x) >= self._many_rows:
            return self.many.moe_w4a16(x, expert, weight, experts, shared)
        (rows, width), top_k = x.shape, expert.shape[1]
        few = self._few_design
        if 0 < rows <= self._few_rows and self._few.takes(rows, top_k, experts, few.list_bytes):
            defines = few_defines(width, experts.inner, top_k, few) | self._switches
            given = (x, expert, weight, experts, shared)
            return self._few.moe_w4a16(*given, defines, THREADS, self._launch)
        out = torch.empty_like(x)
        if rows == 0:
            return out
        inner = x.new_empty(rows * top_k, experts.inner)
        partial = x.new_empty(rows * top_k, width)
        tiles = column_tiles(rows * top_k, experts.num_experts)
        order = self._order(expert, experts.num_experts, tiles)
        defines = moe_defines(width, experts.inner, top_k, tiles, self._design) | self._switches
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


@cache
def moe_defines(
    width: int, inner: int, top_k: int, column_tiles: int, design: Design = DESIGN
) -> dict[str, str | int]:
    return {
        "WIDTH": width,
        "INNER": inner,
        "TOP_K": top_k,
        "COLUMN_TILES": column_tiles,
        "SLOT_STEPS": design.slot_steps,
        "SLOTS": design.slots,
        "PARTS": design.parts,
        "LIST_BYTES": design.list_bytes,
        "BY_LANES": int(design.by_lanes and column_tiles < 4),
        "CATCH_UP": int(design.catch_up),
        "SHARED_BYTES": design.shared_bytes,
    }


@cache
def few_defines(
    width: int, inner: int, top_k: int, design: Design = FEW_DESIGN
) -> dict[str, str | int]:
    return moe_defines(width, inner, top_k, 1, design) | {"MAX_TOP_K": MAX_TOP_K}


def takes(
    x: Tensor, expert: Tensor, weight: Tensor, experts: PackedExperts, shared: Tensor
) -> bool:
    bf16 = x.dtype == shared.dtype == torch.bfloat16 and weight.dtype == torch.float32
    placed = (x, expert, weight, shared, experts.gate_up, experts.down)
    packed = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in placed)
    shaped = x.shape == shared.shape and expert.shape == weight.shape and experts.width % TILE == 0
    fits = experts.num_experts <= MAX_EXPERTS and expert.shape[1] <= MAX_TOP_K
    return bf16 and packed and shaped and fits and expert.dtype == torch.int64
