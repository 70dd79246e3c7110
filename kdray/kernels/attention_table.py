"""How many blocks verify_attention is launched with, and how little work one is worth.

Both are fixed for a bucket of (requests, packed rows a request), so that a captured launch is right
for any contexts; how many of the blocks work is decided on the device, by the lengths of the step.
The rows below are measured: jobs/tune_attention.py writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 72  # at most, packed
DEFAULT_LEAST_COST = 90
SHORT_LEAST_COST = 60
SHORT_ROWS = 8

# (requests at most, packed rows a request at most, rows of a tile, least cost); the first that
# holds is taken.
ROWS: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """blocks: of the grid, all resident; least_cost: of a block's share, in units of
    cuda_attention.SHAPES (a step of 16 keys by 72 rows is 15); tile_rows: a multiple of 8."""

    blocks: int
    least_cost: int
    tile_rows: int = TILE_ROWS


def plan_for(processors: int, requests: int, packed_rows: int) -> AttentionPlan:
    """One block a multiprocessor, and the table's tile and least cost for the launch's bucket."""
    for most_requests, most_rows, tile_rows, least_cost in ROWS:
        if requests <= most_requests and packed_rows <= most_rows:
            return AttentionPlan(processors, least_cost, tile_rows)
    return AttentionPlan(
        processors, SHORT_LEAST_COST if packed_rows <= SHORT_ROWS else DEFAULT_LEAST_COST
    )
