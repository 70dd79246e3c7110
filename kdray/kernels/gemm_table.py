"""How skinny_gemm's work is cut: runs of inputs by the matrix's shape, the rest by tokens as well.

The number of runs decides the order of sums, so it hangs on the shape alone and is the same on
every GPU; how runs and rows are dealt to warps and blocks changes no bit. What is not measured here
follows a rule; jobs/tune_gemm.py writes the rows.
"""

from __future__ import annotations

from dataclasses import astuple
from functools import cache

from kdray.kernels.gemm_cost import estimated_us
from kdray.kernels.gemm_plan import TOKEN_TILES, GemmPlan, GemmShape, candidates

MOST_RUNS = 32
ENOUGH_WARPS = 1024
LEAST_STEPS, MOST_STEPS = 4, 112  # of a run; longer ones would gather more of the sums' errors

# (inputs, outputs, heads): runs.
RUNS: dict[tuple[int, int, int], int] = {
    (128, 512, 8): 2,
    (256, 7168, 1): 4,
    (512, 128, 8): 4,
    (1024, 7168, 1): 4,
    (1536, 1536, 1): 16,
    (7168, 384, 1): 32,
    (7168, 512, 1): 32,
    (7168, 896, 1): 32,
    (7168, 2112, 1): 16,
    (7168, 20480, 1): 2,
}
# (inputs, outputs, heads, tiles of 8 tokens): a plan's fields.
PLANS: dict[tuple[int, int, int, int], tuple[int, int, int, int, int]] = {
    (128, 512, 8, 1): (1, 2, 2, 1, 4),
    (128, 512, 8, 2): (1, 2, 2, 1, 4),
    (128, 512, 8, 4): (1, 2, 2, 1, 8),
    (128, 512, 8, 8): (1, 2, 2, 1, 8),
    (256, 7168, 1, 1): (1, 4, 4, 1, 4),
    (256, 7168, 1, 2): (2, 2, 4, 1, 4),
    (256, 7168, 1, 4): (1, 4, 4, 1, 4),
    (256, 7168, 1, 8): (2, 1, 4, 1, 4),
    (512, 128, 8, 1): (1, 1, 4, 1, 8),
    (512, 128, 8, 2): (2, 1, 4, 1, 8),
    (512, 128, 8, 4): (1, 1, 4, 1, 4),
    (512, 128, 8, 8): (1, 1, 4, 1, 4),
    (1024, 7168, 1, 1): (2, 2, 4, 1, 4),
    (1024, 7168, 1, 2): (2, 2, 4, 1, 4),
    (1024, 7168, 1, 4): (1, 4, 4, 1, 4),
    (1024, 7168, 1, 8): (2, 1, 4, 1, 4),
    (1536, 1536, 1, 1): (1, 1, 16, 1, 4),
    (1536, 1536, 1, 2): (2, 2, 4, 4, 4),
    (1536, 1536, 1, 4): (1, 4, 4, 4, 4),
    (1536, 1536, 1, 8): (1, 4, 2, 8, 4),
    (7168, 384, 1, 1): (1, 2, 4, 8, 8),
    (7168, 384, 1, 2): (2, 1, 4, 8, 8),
    (7168, 384, 1, 4): (2, 2, 2, 16, 8),
    (7168, 384, 1, 8): (2, 2, 2, 16, 4),
    (7168, 512, 1, 1): (2, 1, 8, 4, 4),
    (7168, 512, 1, 2): (2, 2, 2, 16, 4),
    (7168, 512, 1, 4): (2, 2, 2, 16, 4),
    (7168, 512, 1, 8): (2, 2, 2, 16, 4),
    (7168, 896, 1, 1): (2, 1, 8, 4, 4),
    (7168, 896, 1, 2): (1, 8, 2, 16, 4),
    (7168, 896, 1, 4): (1, 4, 4, 8, 4),
    (7168, 896, 1, 8): (2, 2, 2, 16, 4),
    (7168, 2112, 1, 1): (2, 2, 4, 4, 4),
    (7168, 2112, 1, 2): (1, 4, 4, 4, 4),
    (7168, 2112, 1, 4): (1, 4, 4, 4, 4),
    (7168, 2112, 1, 8): (2, 2, 2, 8, 4),
    (7168, 20480, 1, 1): (2, 2, 2, 1, 4),
    (7168, 20480, 1, 2): (2, 4, 1, 2, 8),
    (7168, 20480, 1, 4): (2, 4, 1, 2, 4),
    (7168, 20480, 1, 8): (2, 4, 1, 2, 4),
}


@cache
def runs_of(shape: GemmShape) -> int:
    """A power of two."""
    measured = RUNS.get((shape.inputs, shape.outputs, shape.heads))
    if measured is not None:
        return measured
    runs = 1
    while 2 * runs <= MOST_RUNS and shape.steps >= 2 * runs * LEAST_STEPS:
        enough = runs * shape.tiles * shape.heads >= ENOUGH_WARPS
        if enough and shape.steps <= runs * MOST_STEPS:
            break
        runs *= 2
    # Very many outputs leave no room for sums of several blocks.
    while not all(any(candidates(shape, runs, tiles)) for tiles in TOKEN_TILES):
        runs //= 2
    return runs


@cache
def plan_for(shape: GemmShape, token_tiles: int) -> GemmPlan:
    plan = _plan_of(shape, runs_of(shape), token_tiles)
    assert plan is not None, "runs_of leaves some"
    return plan


@cache
def pair_plan_for(first: GemmShape, second: GemmShape, token_tiles: int) -> GemmPlan | None:
    """For two matrices of the same inputs in one launch, of as many runs as each has alone; None
    where these differ. PLANS has it under the matrix that they are together."""
    runs = runs_of(first)
    if runs_of(second) != runs:
        return None
    return _plan_of(GemmShape(first.inputs, first.outputs + second.outputs), runs, token_tiles)


def _plan_of(shape: GemmShape, runs: int, token_tiles: int) -> GemmPlan | None:
    measured = PLANS.get((shape.inputs, shape.outputs, shape.heads, token_tiles))
    if measured is not None and GemmPlan(*measured).runs == runs:
        return GemmPlan(*measured)
    return min(
        candidates(shape, runs, token_tiles),
        key=lambda plan: (estimated_us(shape, token_tiles, plan), astuple(plan)),
        default=None,
    )
