"""How one product of few rows may be cut for skinny_gemm.cu, and what fits a block.

Nothing here changes a bit but the number of runs: bits hang on it and on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from kdray.kernels.loader import MAX_BLOCK_BYTES

STEP = 32  # inputs a warp multiplies at a time
TILE = 16  # outputs
TOKEN_TILE = 8
TOKEN_TILES = (1, 2, 4, 8)  # what the kernel is compiled for
MOST_SPLIT, MOST_WARPS = 16, 16
MOST_SUMS = 16  # tiles a warp holds
LONGEST_CHUNK = 15  # steps of x that come at once, where tokens are one tile
CHUNKS = 4  # of x, of which there is room, where they are more
MOST_GROUPS = 2  # of 64 tokens: a tree of 64 drafts has 65 rows
WORK_WORDS = 8 << 20  # for sums in parts


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


def token_tiles_for(tokens: int) -> int:
    """The least that hold the tokens, or the most there are."""
    return next((n for n in TOKEN_TILES if TOKEN_TILE * n >= tokens), TOKEN_TILES[-1])


def work_words(shape: GemmShape, token_tiles: int, plan: GemmPlan, groups: int) -> int:
    """What blocks leave for one another, in words of 4 bytes."""
    across = -(-shape.outputs // plan.rows)
    sums = token_tiles * TOKEN_TILE * plan.rows
    left = plan.split if token_tiles > 1 and plan.split > 1 else plan.split - 1
    return groups * across * shape.heads * left * sums


def candidates(shape: GemmShape, runs: int, token_tiles: int) -> Iterator[GemmPlan]:
    """All that the kernel can be compiled for and that fits a block and the workspace."""
    for row_tiles in (1, 2):
        for warps_m in (1, 2, 4, 8):
            for warps_k in (1, 2, 4, 8, 16):
                for slots in (4, 8):
                    if runs % warps_k or runs // warps_k > MOST_SPLIT:
                        continue
                    plan = GemmPlan(row_tiles, warps_m, warps_k, runs // warps_k, slots)
                    words = work_words(shape, token_tiles, plan, MOST_GROUPS)
                    if fits(plan, token_tiles) and words <= WORK_WORDS:
                        yield plan


def fits(plan: GemmPlan, token_tiles: int) -> bool:
    """Whether a block of it has room for sums and for the least rows of x."""
    least = 2 if token_tiles == 1 else CHUNKS
    rows = least * _step_bytes(plan, token_tiles)
    return (
        token_tiles * plan.row_tiles <= MOST_SUMS
        and plan.warps <= MOST_WARPS
        and rows <= _room(plan, token_tiles)
        and _sum_bytes(plan, token_tiles) <= MAX_BLOCK_BYTES - static_bytes(plan, token_tiles)
    )


@cache
def chunk_of(plan: GemmPlan, token_tiles: int, steps: int) -> int:
    """Steps of x that come at once."""
    longest = -(-steps // plan.runs)
    whole = _room(plan, token_tiles) // _step_bytes(plan, token_tiles)
    if token_tiles > 1:
        return 2 if longest > CHUNKS and whole >= 2 * CHUNKS else 1
    # Odd numbers, which keep a chunk's rows in different banks.
    at_once = longest + 1 - longest % 2
    if at_once <= min(whole, LONGEST_CHUNK):
        return at_once
    return min(_odd(whole // 2), LONGEST_CHUNK)


@cache
def shared_bytes(plan: GemmPlan, token_tiles: int, steps: int) -> int:
    """Dynamic shared memory of a block: rings and rows of x, then, in their place, sums."""
    chunk, buffers = chunk_of(plan, token_tiles, steps), CHUNKS
    if token_tiles == 1:
        buffers = 1 if -(-steps // plan.runs) <= chunk else 2
    rows = buffers * chunk * _step_bytes(plan, token_tiles)
    return max(_ring_bytes(plan) + rows, _sum_bytes(plan, token_tiles))


def static_bytes(plan: GemmPlan, token_tiles: int) -> int:
    """A block's barriers, and what aligns the rest."""
    barriers = 2 if token_tiles == 1 else 2 * CHUNKS * plan.warps_k
    return -(-8 * barriers // 128) * 128


def _room(plan: GemmPlan, token_tiles: int) -> int:
    """Bytes for rows of x."""
    return MAX_BLOCK_BYTES - static_bytes(plan, token_tiles) - _ring_bytes(plan)


def _ring_bytes(plan: GemmPlan) -> int:
    return plan.warps * plan.slots * plan.row_tiles * 1024


def _step_bytes(plan: GemmPlan, token_tiles: int) -> int:
    """A step of x for all of the block's runs."""
    return plan.warps_k * token_tiles * TOKEN_TILE * STEP * 2


def _sum_bytes(plan: GemmPlan, token_tiles: int) -> int:
    return plan.warps_k * token_tiles * TOKEN_TILE * (plan.rows + 4) * 4


def _odd(n: int) -> int:
    """The largest odd number that is not above."""
    return n if n % 2 else n - 1
