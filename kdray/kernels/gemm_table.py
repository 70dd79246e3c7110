"""How skinny_gemm's work is cut: runs of inputs by the matrix's shape, the rest by tokens as well.

The number of runs decides the order of sums, so it hangs on the shape alone and is the same on
every GPU; how runs and rows are dealt to warps and blocks changes no bit. What is not measured here
follows a rule; jobs/tune_gemm.py writes the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache

STEP = 32  # inputs a warp multiplies at a time
TILE = 16  # outputs
TOKEN_TILE = 8
TOKEN_TILES = (1, 2, 4, 8)  # what the kernel is compiled for
MOST_RUNS, MOST_SPLIT, MOST_WARPS = 32, 16, 16
MOST_SUMS = 16  # tiles a warp holds

ENOUGH_WARPS = 1024
LEAST_STEPS, MOST_STEPS = 4, 112  # of a run; longer ones would gather more of the sums' errors

# Of the estimate: bytes a microsecond from memory and from L2, multiprocessors, the bytes each must
# have asked for, microseconds of a merge between blocks.
MEMORY_SPEED, L2_SPEED = 4.2e6, 5.5e6
PROCESSORS = 132
BYTES_IN_FLIGHT = 28 * 1024
MERGE_US = 1.5


@dataclass(frozen=True, slots=True, order=True)
class GemmShape:
    """A matrix of [outputs, inputs], or one for each head."""

    inputs: int
    outputs: int
    heads: int = 1

    @property
    def steps(self) -> int:
        return self.inputs // STEP

    @property
    def tiles(self) -> int:
        return -(-self.outputs // TILE)


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """How one launch is cut.

    row_tiles   tiles of 16 outputs a warp
    warps_m     warps of a block beside each other over outputs
    warps_k     over runs of inputs; with `split` blocks they are all of the shape's runs
    slots       steps of weights a warp has room for
    """

    row_tiles: int
    warps_m: int
    warps_k: int
    split: int
    slots: int

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_k

    @property
    def runs(self) -> int:
        return self.warps_k * self.split

    @property
    def rows(self) -> int:
        """Outputs a block."""
        return TILE * self.row_tiles * self.warps_m


# (inputs, outputs, heads): runs.
RUNS: dict[tuple[int, int, int], int] = {}
# (inputs, outputs, heads, tiles of 8 tokens): a plan's fields.
PLANS: dict[tuple[int, int, int, int], tuple[int, int, int, int, int]] = {}


def token_tiles_for(tokens: int) -> int:
    """The least that hold the tokens, or the most there are."""
    return next((n for n in TOKEN_TILES if TOKEN_TILE * n >= tokens), TOKEN_TILES[-1])


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
    return runs


@cache
def plan_for(shape: GemmShape, token_tiles: int) -> GemmPlan:
    runs = runs_of(shape)
    measured = PLANS.get((shape.inputs, shape.outputs, shape.heads, token_tiles))
    if measured is not None and GemmPlan(*measured).runs == runs:
        return GemmPlan(*measured)
    return min(
        candidates(runs, token_tiles),
        key=lambda plan: (estimated_us(shape, token_tiles, plan), astuple(plan)),
    )


def candidates(runs: int, token_tiles: int) -> Iterator[GemmPlan]:
    """All that the kernel can be compiled for and that fits a block."""
    from kdray.kernels.cuda_gemm import fits

    for row_tiles in (1, 2):
        for warps_m in (1, 2, 4, 8):
            for warps_k in (1, 2, 4, 8, 16):
                for slots in (4, 8):
                    if runs % warps_k or runs // warps_k > MOST_SPLIT:
                        continue
                    plan = GemmPlan(row_tiles, warps_m, warps_k, runs // warps_k, slots)
                    if fits(plan, token_tiles):
                        yield plan


def estimated_us(shape: GemmShape, token_tiles: int, plan: GemmPlan) -> float:
    """A guess good enough to begin with: what memory, L2 and the merge take."""
    tokens = TOKEN_TILE * token_tiles
    across = -(-shape.outputs // plan.rows)
    blocks = across * plan.split * shape.heads
    steps = min(plan.slots - 1, shape.steps / plan.runs)
    asked = plan.warps * plan.row_tiles * steps * TILE * STEP * 2
    busy = min(1.0, blocks / PROCESSORS)
    busy *= min(1.0, max(1.0, blocks / PROCESSORS) * asked / BYTES_IN_FLIGHT)
    weights = 2 * shape.inputs * shape.outputs * shape.heads
    rows = 2 * tokens * shape.inputs * across * shape.heads
    partials = 8 * (plan.split - 1) * tokens * shape.outputs * shape.heads
    merge = MERGE_US if plan.split > 1 else 0.0
    return max(weights / MEMORY_SPEED / busy, (weights + rows + partials) / L2_SPEED) + merge
