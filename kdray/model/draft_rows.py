"""Which rows of a planned step a drafter reads, and where they lie: on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kdray.core.plan import AcceptedPaths, PlannedRequest, StepPlan

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


def pages_of(requests: Sequence[PlannedRequest]) -> Int32Array:
    """[R, P]; behind a request's pages stands page 0."""
    table = np.zeros((len(requests), max(len(r.pages) for r in requests)), dtype=np.int32)
    for row, request in zip(table, requests, strict=True):
        row[: len(request.pages)] = request.pages
    return table


def _slots_at(request: PlannedRequest, position: Int64Array, page_size: int) -> Int64Array:
    """Cache slots of a request's positions, by its page table."""
    pages: Int64Array = request.pages[position // page_size].astype(np.int64)
    return pages * page_size + position % page_size


def committed_rows(
    plan: StepPlan, paths: AcceptedPaths, row_start: Sequence[int], page_size: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Rows of the step that became text, with their positions and cache slots; [M] int64 each."""
    node, length = paths.node.tolist(), paths.length.tolist()
    rows, positions, slots = [], [], []
    for r, request in enumerate(plan.requests):
        known = len(request.known)
        accepted = np.array(node[r][1 : length[r]], dtype=np.int64)
        first = row_start[r] + np.arange(known, dtype=np.int64)
        rows += [first, row_start[r] + known - 1 + accepted]
        position = request.num_cached + np.arange(known + len(accepted), dtype=np.int64)
        positions.append(position)
        slots.append(_slots_at(request, position, page_size))
    return np.concatenate(rows), np.concatenate(positions), np.concatenate(slots)
