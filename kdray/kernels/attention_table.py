"""How many blocks verify_attention is launched with, and how little work one is worth.

Both are fixed for a bucket of (requests, packed rows a request), so that a captured launch is right
for any contexts; how many of the blocks work is decided on the device, by the lengths of the step.
The rows below are measured: jobs/tune_attention.py writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

# Guessed from counts until the table below is measured: a part of 72 rows is 147 KB written and
# read again, about 0.1 us of all the machine's L2; a step is about 0.7 us of one multiprocessor.
# With n blocks for S steps both together, 0.7 S / n + 0.1 n, are least at 8 or 9 steps a block for
# the 512 steps of 8k tokens. Parts of up to 8 rows are a ninth of that.
DEFAULT_LEAST_COST = 90
SHORT_LEAST_COST = 16
SHORT_ROWS = 8

# (requests at most, packed rows a request at most, least cost); the first that holds is taken.
ROWS: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """blocks: of the grid, all resident; least_cost: of a block's share, in verify_attention.cu's
    units (a step of 16 keys by 64 rows is 10)."""

    blocks: int
    least_cost: int


def plan_for(processors: int, requests: int, packed_rows: int) -> AttentionPlan:
    """One block a multiprocessor, and the table's least cost for the launch's bucket."""
    for most_requests, most_rows, least_cost in ROWS:
        if requests <= most_requests and packed_rows <= most_rows:
            return AttentionPlan(processors, least_cost)
    return AttentionPlan(
        processors, SHORT_LEAST_COST if packed_rows <= SHORT_ROWS else DEFAULT_LEAST_COST
    )
