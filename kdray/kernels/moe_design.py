"""How moe_w4a16.cu and moe_w4a16_few.cu work, which never changes a result, and their defines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kdray.kernels.moe_layout import STEP_BYTES

# As in the .cu files.
WARPS = 16
THREADS = WARPS * 32
MAX_TOP_K = 32
MAX_UNSORTED, MAX_UNSORTED_BY_WARP = 128, 32  # pairs that a block, a warp sorts for itself
UNIT_COLUMNS = 8
SORTED_BYTES = 8 * MAX_UNSORTED + 16  # of a block's list


@dataclass(frozen=True, slots=True)
class Design:
    """How a block works, which never changes a result.

    slot_steps, slots   of a warp's ring of weights
    parts               buffers to add up in
    list_bytes          for the order of the pairs, which else stays in global memory
    by_lanes            weights are copied by the lanes, not by the copy engine; the widest tiles
                        have no registers for it
    catch_up            blocks with less of the first half begin the second before the others
    """

    slot_steps: int = 2
    slots: int = 3
    parts: int = 2
    list_bytes: int = 10_240
    by_lanes: bool = True
    catch_up: bool = True

    @property
    def shared_bytes(self) -> int:
        slot = self.slot_steps * STEP_BYTES + 8  # its barrier
        return (
            WARPS * (self.slots * slot + self.parts * 8 * 32 * 4)
            + self.list_bytes
            + self.parts * 16  # two barriers each
            + 32  # a constant, a counter
        )

    def sorts(self, rows: int, top_k: int) -> bool:
        """Whether a block sorts a step's pairs for itself, where tiles hold 8 rows."""
        if self.list_bytes >= SORTED_BYTES:
            return rows * top_k <= MAX_UNSORTED
        return rows * top_k <= MAX_UNSORTED_BY_WARP and rows <= UNIT_COLUMNS


DESIGN = Design()
# Of one row or two, in units of whole tiles. Four slots, which all weights of a unit of the second
# half fit before its rows come, are slower: 14.0 us for 13.6 at 1 row, 23.2 for 22.6 at 2.
FEW_DESIGN = Design(slots=3, parts=1)


@cache
def moe_defines(
    width: int, inner: int, top_k: int, column_tiles: int, design: Design = DESIGN
) -> dict[str, str | int]:
    return {
        "WIDTH": width,
        "INNER": inner,
        "TOP_K": top_k,
        "COLUMN_TILES": column_tiles,
        "SLOT_STEPS": design.slot_steps,
        "SLOTS": design.slots,
        "PARTS": design.parts,
        "LIST_BYTES": design.list_bytes,
        "BY_LANES": int(design.by_lanes and column_tiles < 4),
        "CATCH_UP": int(design.catch_up),
        "SHARED_BYTES": design.shared_bytes,
    }


@cache
def few_defines(width: int, inner: int, top_k: int) -> dict[str, str | int]:
    return moe_defines(width, inner, top_k, 1, FEW_DESIGN) | {"MAX_TOP_K": MAX_TOP_K}
