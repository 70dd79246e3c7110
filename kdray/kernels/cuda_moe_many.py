"""Launches sort_many_rows.cu and moe_w4a16_many.cu: routed INT4 experts of hundreds of rows.

Nothing waits for the device; all may be captured in a graph.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kdray.kernels.loader import KernelLoader
from kdray.kernels.moe_layout import STEP_BYTES, TILE, PackedExperts

# As in the .cu files.
WARPS = 8
THREADS = WARPS * 32
TILE_ROWS = 64
LISTED_TILES = 640  # that a block keeps in shared memory
STAGE_STEPS, ROW_SLOTS, WEIGHT_SLOTS = 2, 5, 6
COUNT_THREADS, PLACE_THREADS, PAIRS_AT_ONCE = 1024, 512, 8
SUM_THREADS, SUM_COLUMNS = 128, 8
BLOCKS_OF_UP, BLOCKS_OF_DOWN = 1, 2  # on a multiprocessor

_STEP_ROWS_BYTES = (TILE_ROWS + 1) * TILE * 2
_SLOT_BYTES = STAGE_STEPS * STEP_BYTES + 8  # its barrier
_FIXED_BYTES = (
    ROW_SLOTS * STAGE_STEPS * _STEP_ROWS_BYTES
    + WARPS * WEIGHT_SLOTS * _SLOT_BYTES
    + 2 * STAGE_STEPS * TILE_ROWS * 4  # what is found of the rows, twice
)


class PlacedPairs(NamedTuple):
    """As sort_many_rows.cu leaves them; what lies behind num_tiles means nothing.

    tile [at most] int32, pair [P] int32, place [P] int32, num_tiles [1] int32
    """

    tile: Tensor
    pair: Tensor
    place: Tensor
    num_tiles: Tensor


class CudaMoeMany:
    """The op on one device, for what cuda_moe.takes takes, of up to 65,536 pairs."""

    def __init__(
        self, loader: KernelLoader, processors: int, listed_tiles: int = LISTED_TILES
    ) -> None:
        """listed_tiles: a multiple of 4, for which a block has room; more of them cost time."""
        self._loader = loader
        self._processors = processors
        self._listed_tiles = listed_tiles

    def moe_w4a16(
        self, x: Tensor, expert: Tensor, weight: Tensor, experts: PackedExperts, shared: Tensor
    ) -> Tensor:
        """As in Ops; a row has the bits that moe_w4a16.cu gives it."""
        (rows, width), top_k = x.shape, expert.shape[1]
        out = torch.empty_like(x)
        inner = x.new_empty(rows * top_k, experts.inner)
        partial = x.new_empty(rows * top_k, width)
        order = self.sort_rows(expert, experts.num_experts)
        defines = many_defines(width, experts.inner, top_k, self._listed_tiles)
        self._multiply(
            "moe_w4a16_many_up",
            BLOCKS_OF_UP,
            (inner, x, experts.gate_up, order.tile, order.pair, order.num_tiles),
            defines,
        )
        self._multiply(
            "moe_w4a16_many_down",
            BLOCKS_OF_DOWN,
            (partial, inner, experts.down, order.tile, order.num_tiles),
            defines,
        )
        self._loader.get("moe_w4a16_many", "moe_sum_many", defines).launch(
            (rows, -(-width // (SUM_THREADS * SUM_COLUMNS))),
            SUM_THREADS,
            (out, partial, order.place, weight, shared),
            overlap=True,
        )
        return out

    def sort_rows(self, expert: Tensor, num_experts: int) -> PlacedPairs:
        """expert [T, k] int64."""
        pairs = expert.numel()
        most = min(pairs, num_experts + pairs // TILE_ROWS)
        padded = -(-pairs // PAIRS_AT_ONCE) * PAIRS_AT_ONCE

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=expert.device)

        found = PlacedPairs(room(most), room(pairs), room(pairs), room(1))
        start, narrow = room(num_experts), room(padded, dtype=torch.int16)
        defines = sort_defines(num_experts)
        self._loader.get("sort_many_rows", "sort_rows_count", defines).launch(
            1,
            COUNT_THREADS,
            (found.tile, found.num_tiles, start, narrow, expert, pairs),
            overlap=True,
        )
        self._loader.get("sort_many_rows", "sort_rows_place", defines).launch(
            num_experts,
            PLACE_THREADS,
            (found.pair, found.place, start, narrow, pairs),
            overlap=True,
        )
        return found

    def _multiply(
        self,
        entry: str,
        blocks: int,
        args: tuple[Tensor, ...],
        defines: dict[str, str | int],
    ) -> None:
        self._loader.get("moe_w4a16_many", entry, defines).launch(
            blocks * self._processors,
            THREADS,
            args,
            shared_bytes=shared_bytes(self._listed_tiles),
            overlap=True,
        )


@cache
def sort_defines(num_experts: int) -> dict[str, str | int]:
    return {"NUM_EXPERTS": num_experts, "TILE_ROWS": TILE_ROWS}


def shared_bytes(listed_tiles: int = LISTED_TILES) -> int:
    return _FIXED_BYTES + 4 * listed_tiles


@cache
def many_defines(
    width: int, inner: int, top_k: int, listed_tiles: int = LISTED_TILES
) -> dict[str, str | int]:
    return {
        "WIDTH": width,
        "INNER": inner,
        "TOP_K": top_k,
        "LISTED_TILES": listed_tiles,
        "SHARED_BYTES": shared_bytes(listed_tiles),
    }
