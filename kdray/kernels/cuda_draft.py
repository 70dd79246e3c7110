"""Launches draft_attention.cu: a drafter's blocks over their paged context and over themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.attention_batch import DraftAttentionBatch
from kdray.kernels.loader import NO_DEFINES, KernelLoader, processors_of
from kdray.kernels.nvrtc import Defines

# As in draft_attention.cu.
STAGES = {64: 3, 128: 2}  # by D: those that are compiled
TILES = (1, 2, 4, 8)  # of 16 rows
STEP = 64
MAX_PIECES = 32
NO_WINDOW = 1 << 30
ENTRIES = {torch.bfloat16: "draft_attention", torch.float32: "draft_attention_fp32"}

WARP = 32
VECTOR_BYTES = 16
LOG2_E = math.log2(math.e)
# By reasoning, not by measurement: pieces keep the multiprocessors busy to the end; one block has
# to merge all of a request and key head; a piece is worth a block from so many steps on.
PIECES_A_PROCESSOR = 4
PIECES_A_REQUEST = 16
LEAST_STEPS = 2


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """pieces: that the keys of all requests are cut into, about, for each key head; least_steps: of
    64 keys, that a piece has but for what is left over; stages: of a block's ring of steps, None:
    what leaves room for several blocks."""

    pieces: int
    least_steps: int
    stages: int | None = None


class CudaDraftAttention:
    """The op on one device. Its workspace serves one launch at a time: use it on one stream."""

    def __init__(
        self,
        loader: KernelLoader,
        *,
        plan: DraftPlan | None = None,
        variant: Defines = NO_DEFINES,
    ) -> None:
        """plan: instead of the usual one; variant: further defines of the kernel, for measuring."""
        self._loader = loader
        self._plan = plan
        self._variant = dict(variant)
        self._work: dict[tuple[int, int, int], _Workspace] = {}

    def draft_attention(
        self, query: Tensor, own: Tensor, cache: Tensor, batch: DraftAttentionBatch, scale: float
    ) -> Tensor:
        """As kernels.ops.Ops.draft_attention; raises KernelError for what `takes` denies.

        May be captured: grid and workspace depend on shapes alone.
        """
        if not takes(query, own, cache, batch):
            raise KernelError(_refusal(query, own, cache, batch))
        requests, slots, heads, dim = query.shape
        groups, pages = own.shape[3], batch.page_table.shape[1]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if not out.numel():
            return out
        tiles = row_tiles(slots * heads // groups)
        window = min(batch.window or NO_WINDOW, NO_WINDOW)
        plan = self._plan or plan_for(processors_of(self._loader.device), requests, groups)
        work = self._workspace(groups, tiles, dim)
        query = query if _in_rows(query) else query.contiguous()
        wished = defines(dim, tiles, plan.stages) | self._variant
        kernel = self._loader.get("draft_attention", ENTRIES[query.dtype], wished)
        reach = min(pages * batch.page_size, window) + slots
        most = min(MAX_PIECES, -(-reach // (STEP * plan.least_steps)))
        kernel.launch(
            groups * min(plan.pieces + requests, most * requests),
            WARP * warps(tiles),
            (
                *(out, work.value, work.norm, work.ticket, query, own, cache),
                *(batch.end, batch.page_table),
                *map(np.int64, query.stride()[:2]),
                *(requests, slots, groups, heads // groups),
                *(pages, batch.page_size.bit_length() - 1),
                *(int(batch.causal), window),
                *(np.float32(scale * LOG2_E), plan.pieces, plan.least_steps),
            ),
            shared_bytes=shared_bytes(query.dtype, dim, tiles, plan.stages),
            overlap=True,
        )
        return out

    def _workspace(self, groups: int, tiles: int, dim: int) -> _Workspace:
        """Made at a shape's first call, which must not be the one that is captured; large enough
        for any number of requests."""
        key = (groups, tiles, dim)
        if key not in self._work:
            device = self._loader.device
            most = self._plan or DraftPlan(most_pieces(processors_of(device), groups), LEAST_STEPS)
            slots = 2 * most.pieces
            self._work[key] = _Workspace.empty(slots, groups, 16 * tiles, dim, device)
        return self._work[key]


@dataclass(frozen=True, slots=True, eq=False)
class _Workspace:
    """Parts of requests on their way from the blocks that made them to those that merge them."""

    value: Tensor
    norm: Tensor
    ticket: Tensor

    @classmethod
    def empty(
        cls, slots: int, groups: int, rows: int, dim: int, device: torch.device
    ) -> _Workspace:
        return cls(
            value=torch.empty(slots, groups, rows, dim, device=device),
            norm=torch.empty(slots, groups, rows, 2, device=device),
            ticket=torch.zeros(slots, groups, dtype=torch.int32, device=device),
        )


def plan_for(processors: int, requests: int, groups: int) -> DraftPlan:
    """Fixed for a number of requests, so that a captured launch is right for any contexts."""
    one_a_processor = -(-processors // groups)
    wanted = max(one_a_processor, PIECES_A_REQUEST * requests)
    return DraftPlan(min(wanted, most_pieces(processors, groups)), LEAST_STEPS)


def most_pieces(processors: int, groups: int) -> int:
    return -(-PIECES_A_PROCESSOR * processors // groups)


def takes(query: Tensor, own: Tensor, cache: Tensor, batch: DraftAttentionBatch) -> bool:
    """Whether the kernel serves these; what it does not, the reference does."""
    (_, slots, heads, dim), groups, size = query.shape, own.shape[3], batch.page_size
    if query.dtype not in ENTRIES or not own.dtype == cache.dtype == query.dtype:
        return False
    if dim not in STAGES or heads % groups or slots * heads // groups > 16 * TILES[-1]:
        return False
    rows = own.shape == (len(query), slots, 2, groups, dim) and cache.shape[1:] == own.shape[2:]
    small = len(cache) < 2**31 and batch.page_table.shape[1] * size < 2**30
    typed = batch.end.dtype == batch.page_table.dtype == torch.int32
    packed = all(t.is_contiguous() for t in (own, cache, batch.end, batch.page_table))
    aligned = all(t.data_ptr() % VECTOR_BYTES == 0 for t in (own, cache))
    wide = batch.window is None or batch.window > 0
    return rows and small and typed and packed and aligned and wide and size & (size - 1) == 0


def row_tiles(rows: int) -> int:
    """Of 16 rows each: the least that will do."""
    return next(tiles for tiles in TILES if rows <= 16 * tiles)


def warps(tiles: int) -> int:
    return max(4, tiles)


@cache
def defines(dim: int, tiles: int, stages: int | None = None) -> dict[str, str | int]:
    """What draft_attention.cu is compiled with."""
    return {
        "HEAD_DIM": dim,
        "ROW_TILES": tiles,
        "STAGES": stages or STAGES[dim],
        "SHARED_BYTES": shared_bytes(torch.bfloat16, dim, tiles, stages),
        "SHARED_BYTES_FP32": shared_bytes(torch.float32, dim, tiles),
    }


def shared_bytes(dtype: torch.dtype, dim: int, tiles: int, stages: int | None = None) -> int:
    """Dynamic shared memory of a block: the larger of what its loop and its merge take."""
    merge = 4 * 16 * tiles * MAX_PIECES
    if dtype == torch.float32:
        return max(4 * 16 * tiles * dim, merge) + 4 * 2 * WARP * (dim + 4) + 128
    ring = (stages or STAGES[dim]) * 2 * STEP * 2 * dim
    sums = warps(tiles) * 16 * (4 * (dim + 8) + 8)
    return -(-max(ring, sums, merge) // 128) * 128 + 128


def _in_rows(query: Tensor) -> bool:
    """Whether all heads of a slot lie side by side, wherever a slot starts."""
    dim, vector = query.shape[3], VECTOR_BYTES // query.itemsize
    whole = query.stride(3) == 1 and query.stride(2) == dim and query.data_ptr() % VECTOR_BYTES == 0
    return whole and all(step % vector == 0 for step in query.stride()[:2])


def _refusal(query: Tensor, own: Tensor, cache: Tensor, batch: DraftAttentionBatch) -> str:
    return (
        f"draft_attention takes no query {tuple(query.shape)} {query.dtype} with own "
        f"{tuple(own.shape)}, a cache {tuple(cache.shape)} of {cache.dtype} and pages of "
        f"{batch.page_size}: bfloat16 or float32, D of {tuple(STAGES)}, S * H / G up to "
        f"{16 * TILES[-1]}, all but the query contiguous, end and page_table int32, pages of a "
        "power of two"
    )
