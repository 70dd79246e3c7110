"""Launches plan_attention.cu: deals out the work of a batch of verify_attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kdray.kernels.attention_rows import AttentionRows
from kdray.kernels.attention_table import SHAPES, AttentionPlan, EntryShape, plan_for
from kdray.kernels.loader import KernelLoader, processors_of

MAX_BLOCKS = 256
PLAN_THREADS = 256
MOST_FEW_TILES = 2  # of few rows, for each block, where all requests have all their rows


class TileSizes(NamedTuple):
    """Packed rows of a tile that plan_attention.cu has to choose from."""

    most: int
    small: int
    few: int
    few_cost: int  # for tiles of `few`, as AttentionPlan has it


def tile_sizes(
    plan: AttentionPlan, most: int, blocks: int, requests: int, packed_rows: int
) -> TileSizes:
    """packed_rows: of a request, at most. Where tiles of few rows would hardly ever have a block
    each they are left out: trying them takes time too."""
    small = min(plan.small_rows, most)
    few = min(plan.few_rows, small)
    while few < small and requests * -(-packed_rows // few) > MOST_FEW_TILES * blocks:
        few = min(2 * few, small)
    few_cost = plan.few_cost if few <= plan.few_rows else plan.twice_cost
    return TileSizes(most, small, few, few_cost)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSchedule:
    """Who does what of a batch, for all layers: plan_attention.cu.

    piece   [P, 16] int32, as reference_plan.PIECE_FIELDS names them
    start   [G + 1] int32: block b has pieces start[b] .. start[b + 1] - 1
    """

    piece: Tensor
    start: Tensor

    @property
    def blocks(self) -> int:
        return self.start.shape[0] - 1


class AttentionPlanner:
    """Schedules for one device."""

    def __init__(self, loader: KernelLoader, plan: AttentionPlan | None = None) -> None:
        """plan: instead of the table's."""
        self._loader = loader
        self._on_gpu = loader.device.type == "cuda"
        self._plan = plan
        self._processors = processors_of(loader.device)

    @property
    def most_blocks(self) -> int:
        """Of any schedule. They wait for one another: a multiprocessor for each."""
        wished = min(MAX_BLOCKS, self._plan.blocks if self._plan else self._processors)
        return min(wished, self._processors) if self._on_gpu else wished

    def schedule(self, rows: AttentionRows, dtype: torch.dtype, heads: int) -> AttentionSchedule:
        """Deal out the batch's work, by its lengths; may be captured.

        How many blocks there are depends on R, rows_cap and H alone.
        """
        shape, requests = SHAPES[dtype], rows.page_table.shape[0]
        plan = self._plan or self._plan_for(dtype, requests, rows.rows_cap * heads)
        blocks = min(plan.blocks, self.most_blocks)
        sizes = tile_sizes(plan, self._tile_rows(shape), blocks, requests, rows.rows_cap * heads)
        tiles = -(-rows.rows_cap * heads // sizes.few)
        device = rows.row_start.device
        schedule = AttentionSchedule(
            piece=torch.empty(requests * tiles + blocks, 16, dtype=torch.int32, device=device),
            start=torch.empty(blocks + 1, dtype=torch.int32, device=device),
        )
        cost = torch.empty(max(requests * tiles, 1), dtype=torch.int32, device=device)
        self._loader.get("plan_attention", "plan_attention").launch(
            1,
            PLAN_THREADS,
            (
                *(schedule.piece, schedule.start, cost, *rows.lengths),
                *(requests, heads, rows.page_table.shape[1], rows.page_size.bit_length() - 1),
                *(rows.mask.shape[1], tiles, sizes.most),
                *(sizes.small, plan.small_cost, sizes.few, sizes.few_cost),
                plan.twice_cost,
                *(shape.step, shape.step_cost, shape.eight_cost, shape.setup_cost),
                *(max(shape.lowest_share, plan.least_cost), blocks),
            ),
            overlap=True,
        )
        return schedule

    def _tile_rows(self, shape: EntryShape) -> int:
        """Rows of a tile at most; sm_120 has registers for one eight less (.._shared.cuh)."""
        newer = self._on_gpu and int(self._loader.arch[3:]) >= 120
        return min(shape.tile_rows, 64) if newer else shape.tile_rows

    def _plan_for(self, dtype: torch.dtype, requests: int, packed_rows: int) -> AttentionPlan:
        if dtype == torch.float32:
            return AttentionPlan(self._processors, SHAPES[dtype].lowest_share)
        return plan_for(self._processors, requests, packed_rows)
