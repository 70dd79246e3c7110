"""How many blocks verify_attention is launched with, and how its work is cut.

Fixed for a bucket of (requests, packed rows a request), so that a captured launch is right for any
contexts; how many of the blocks work, and in which tiles, plan_attention.cu decides on the device,
by the lengths of the step. The rows below are measured: jobs/tune_attention.py writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_LEAST_COST = 90
SMALL_ROWS = 40
SMALL_COST = 150

# (requests at most, packed rows a request at most, least cost, small cost); the first that holds is
# taken.
ROWS: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Costs are in units of cuda_attention.SHAPES: a step of 16 keys by 72 rows is 15.

    blocks       of the grid, one a multiprocessor at most
    least_cost   of a block's share of the work
    small_cost   where all work is less than this for each block, tiles have small_rows rows (a
                 multiple of 8) instead of the most: more tiles, so fewer parts of each to merge
    """

    blocks: int
    least_cost: int
    small_cost: int = SMALL_COST
    small_rows: int = SMALL_ROWS


def plan_for(processors: int, requests: int, packed_rows: int) -> AttentionPlan:
    """One block a multiprocessor, and the table's costs for the launch's bucket."""
    for most_requests, most_rows, least_cost, small_cost in ROWS:
        if requests <= most_requests and packed_rows <= most_rows:
            return AttentionPlan(processors, least_cost, small_cost)
    return AttentionPlan(processors, DEFAULT_LEAST_COST)
