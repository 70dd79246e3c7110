"""How many blocks verify_attention is launched with, and how its work is cut.

Fixed for a bucket of (requests, packed rows a request), so that a captured launch is right for any
contexts; how many of the blocks work, and in which tiles, plan_attention.cu decides on the device,
by the lengths of the step. The rows below are measured: jobs/tune_attention.py writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DEFAULT_LEAST_COST = 90
SMALL_ROWS = 40
SMALL_COST = 150
# Measured at 8 heads, 1 to 16 requests and up to 32,768 keys on an H200 (decision 12).
FEW_ROWS = 8
FEW_COST = 110
TWICE_COST = 170

# (requests at most, packed rows a request at most, least cost, small cost); the first that holds is
# taken.
ROWS: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EntryShape:
    """One entry point of verify_attention.cu: its block, its tiles, and what they cost.

    step        keys; a step of a tile of n eights of rows costs step_cost + eight_cost * n
    setup_cost  of a piece beside its steps
    """

    entry: str
    threads: int
    tile_rows: int
    step: int
    step_cost: int
    eight_cost: int
    setup_cost: int

    @property
    def lowest_share(self) -> int:
        """plan_attention.cu takes no lower least cost."""
        dearest = self.step_cost + self.eight_cost * (self.tile_rows // 8)
        return 2 * (self.setup_cost + dearest)


SHAPES = {
    torch.bfloat16: EntryShape("verify_attention", 384, 72, 16, 6, 1, 40),
    torch.float32: EntryShape("verify_attention_fp32", 256, 8, 32, 1, 0, 2),
}


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Costs are in units of SHAPES: a step of 16 keys by 72 rows is 15.

    blocks       of the grid, one a multiprocessor at most
    least_cost   of a block's share of the work
    small_cost   where all work is less than this for each block, tiles have small_rows rows (a
                 multiple of 8) instead of the most: more tiles, so fewer parts of each to merge
    few_cost     where all work in tiles of few_rows rows is less than this for each block, and
                 there is a block for each, tiles have as many: a block's way through one is what
                 takes the time there
    twice_cost   the same of tiles of twice as many rows, where those were too much
    """

    blocks: int
    least_cost: int
    small_cost: int = SMALL_COST
    small_rows: int = SMALL_ROWS
    few_cost: int = FEW_COST
    twice_cost: int = TWICE_COST
    few_rows: int = FEW_ROWS


def plan_for(processors: int, requests: int, packed_rows: int) -> AttentionPlan:
    """One block a multiprocessor, and the table's costs for the launch's bucket."""
    for most_requests, most_rows, least_cost, small_cost in ROWS:
        if requests <= most_requests and packed_rows <= most_rows:
            return AttentionPlan(processors, least_cost, small_cost)
    return AttentionPlan(processors, DEFAULT_LEAST_COST)
