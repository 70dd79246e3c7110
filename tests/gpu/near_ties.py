"""Replies that may part only where two tokens stood as near as rounding."""

from __future__ import annotations

from jobs.traffic import Reply, Visit
from tests.gpu.test_demo import NEAR_TIE, margin


def check_same(visit: Visit, mine: Reply, other: Reply) -> None:
    """Equal as far as both go, or parted at a near tie of float32 sums in another order."""
    shared = list(zip(mine.token_ids, other.token_ids, strict=False))
    at = next((i for i, (a, b) in enumerate(shared) if a != b), None)
    if at is not None:
        gap = margin([*visit.prompt, *mine.token_ids[:at]], *shared[at], visit.sampling)
        print(f"differs at token {at}, margin {gap:.2e}")
        assert gap < NEAR_TIE
    elif visit.patience is None:
        assert mine == other
