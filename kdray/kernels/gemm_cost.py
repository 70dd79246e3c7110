"""What one way to cut a product costs on an H200, as far as can be told without running it.

Good to tell the few plans worth timing (jobs/tune_gemm.py) and to begin with where nothing was
timed. Its constants for one tile of tokens, and what a multiprocessor can do, are fitted to timed
plans, within some 12 % of them; those of more tiles follow from the same machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kdray.kernels.gemm_plan import STEP, TOKEN_TILE, GemmPlan, GemmShape, chunk_of, shared_bytes

PROCESSORS = 132
PROCESSOR_BYTES, BLOCK_BYTES = 227 << 10, 1 << 10  # shared memory; of which each block costs
# Threads that registers allow, by the tiles of sums that a warp holds.
FEW_SUMS, MANY_SUMS = 4, 16
THREADS, THREADS_OF_FEW, THREADS_OF_MANY = 512, 1024, 384

# Bytes a microsecond: of memory and of L2; of one multiprocessor from both, and of its shared
# memory.
MEMORY_SPEED, L2_SPEED = 4.6e6, 6.5e6
ARRIVAL_SPEED, SHARED_SPEED = 85e3, 170e3
# Microseconds: what a launch takes by itself, from asking for weights to having them, of a product
# of 16 by 8 on a multiprocessor.
START_US, FETCH_US, PRODUCT_US = 1.5, 0.75, 0.0014
# A warp's step by itself, and each of its products: of one tile of tokens, of several.
STEP_US, ALONE_US, AMONG_OTHERS_US = 0.05, 0.02, 0.006
# One tile of tokens: the block's warps meet, and wait for a chunk; a row's copy.
MEETING_US, COPY_US = 0.41, 0.005
# The merge of one tile of tokens, by the last block: each part, each round of vectors by parts.
PART_US, ROUND_US = 0.08, 0.07
# Of more tiles, by all blocks: in all, each round that is left for others, each that is gathered.
EXCHANGE_US, LEAVE_US, GATHER_US = 1.0, 0.05, 0.3
SHARPNESS = 5  # near 1 where what takes time adds up, large where the longest hides the others


@dataclass(frozen=True, slots=True)
class _Load:
    """What the busiest multiprocessor has to do."""

    blocks: int
    at_once: int
    steps: int  # of a run

    @property
    def turns(self) -> int:
        return ceil(self.blocks / self.at_once)


def estimated_us(shape: GemmShape, token_tiles: int, plan: GemmPlan) -> float:
    load = _load(shape, token_tiles, plan)
    body = [
        _weights_us(shape, plan, load),
        _l2_us(shape, token_tiles, plan),
        _shared_us(token_tiles, plan, load),
        load.blocks * plan.warps * load.steps * _products(token_tiles, plan) * PRODUCT_US,
        _chain_us(token_tiles, plan, load),
    ]
    rest = 0.0
    if token_tiles == 1:
        chunks = ceil(load.steps / chunk_of(plan, 1, shape.steps))
        body.append(load.blocks * TOKEN_TILE * plan.warps_k * chunks * COPY_US)
        rest = load.turns * chunks * MEETING_US
    together = float(sum(us**SHARPNESS for us in body) ** (1 / SHARPNESS))
    return START_US + together + rest + _merge_us(token_tiles, plan)


def _load(shape: GemmShape, token_tiles: int, plan: GemmPlan) -> _Load:
    blocks = -(-shape.outputs // plan.rows) * plan.split * shape.heads
    busiest = ceil(blocks / PROCESSORS)
    by_threads = _threads(token_tiles, plan) // (32 * plan.warps)
    by_bytes = PROCESSOR_BYTES // (shared_bytes(plan, token_tiles, shape.steps) + BLOCK_BYTES)
    return _Load(busiest, min(busiest, by_threads, by_bytes), ceil(shape.steps / plan.runs))


def _threads(token_tiles: int, plan: GemmPlan) -> int:
    sums = token_tiles * plan.row_tiles
    if sums <= FEW_SUMS:
        return THREADS_OF_FEW
    return THREADS_OF_MANY if sums >= MANY_SUMS and plan.warps < 8 else THREADS


def _products(token_tiles: int, plan: GemmPlan) -> int:
    """A warp's step."""
    return 2 * plan.row_tiles * token_tiles


def _block_bytes(plan: GemmPlan, load: _Load) -> int:
    """Of weights."""
    return plan.warps * plan.row_tiles * load.steps * 1024


def _weights_us(shape: GemmShape, plan: GemmPlan, load: _Load) -> float:
    """All of them from memory, and the busiest multiprocessor's, by what it may have asked for."""
    whole = 2 * shape.inputs * shape.outputs * shape.heads
    ahead = min(plan.slots - 0.5, load.steps)
    asked = load.at_once * plan.warps * plan.row_tiles * 1024 * ahead
    speed = min(ARRIVAL_SPEED, asked / FETCH_US)
    return max(whole / MEMORY_SPEED, load.blocks * _block_bytes(plan, load) / speed)


def _l2_us(shape: GemmShape, token_tiles: int, plan: GemmPlan) -> float:
    """Weights; rows of x, once for each block of outputs; sums, there and back."""
    tokens, across = token_tiles * TOKEN_TILE, -(-shape.outputs // plan.rows)
    weights = 2 * shape.inputs * shape.outputs
    rows = 2 * tokens * shape.inputs * across
    sums = 8 * (plan.split - 1) * tokens * shape.outputs
    return shape.heads * (weights + rows + sums) / L2_SPEED


def _shared_us(token_tiles: int, plan: GemmPlan, load: _Load) -> float:
    """Written and read: weights once, rows of x by every warp."""
    row_step = token_tiles * TOKEN_TILE * STEP * 2
    rows = load.steps * row_step * (plan.warps_k + plan.warps)
    return load.blocks * (2 * _block_bytes(plan, load) + rows) / SHARED_SPEED


def _chain_us(token_tiles: int, plan: GemmPlan, load: _Load) -> float:
    """One warp's steps behind one another."""
    each = ALONE_US if token_tiles == 1 else AMONG_OTHERS_US
    return load.turns * load.steps * (STEP_US + _products(token_tiles, plan) * each)


def _merge_us(token_tiles: int, plan: GemmPlan) -> float:
    if plan.split == 1:
        return 0.0
    vectors = token_tiles * TOKEN_TILE * plan.rows // 4
    rounds = vectors / (32 * plan.warps)
    if token_tiles == 1:
        return plan.split * (PART_US + max(rounds, 0.25) * ROUND_US)
    return EXCHANGE_US + ceil(rounds) * LEAVE_US + ceil(rounds / plan.split) * GATHER_US
