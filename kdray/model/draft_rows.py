"""Which rows of a planned step a drafter reads, and where they lie: on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kdray.core.plan import AcceptedPaths, Int64Array, StepPlan


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
        slots.append(request.slots_at(position, page_size))
    return np.concatenate(rows), np.concatenate(positions), np.concatenate(slots)
