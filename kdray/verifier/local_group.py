"""A group of one: the verifier in the driver's own process."""

from __future__ import annotations

from torch import Tensor

from kdray.core.plan import (
    AcceptedPaths,
    DeviceVerified,
    DraftTrees,
    RoundOrder,
    RunningRows,
    StepPlan,
    Verified,
)
from kdray.core.profile import ProfileOrder
from kdray.verifier.verifier import Verifier


class LocalGroup:
    """One rank, no messages: for one GPU, for notebooks and for tests."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def verify(self, plan: StepPlan, trees: DraftTrees) -> Verified:
        return self._verifier.verify(plan, trees)

    def commit(self, paths: AcceptedPaths) -> None:
        self._verifier.commit(paths)

    def order_round(self, order: RoundOrder) -> None:
        """There are no other ranks to tell."""

    def verify_on_device(
        self, trees: DraftTrees, position: Tensor, rows: RunningRows
    ) -> DeviceVerified:
        return self._verifier.verify_on_device(trees, position, rows)

    def commit_on_device(self, paths: AcceptedPaths, rows: RunningRows) -> None:
        self._verifier.commit_on_device(paths, rows)

    def profile(self, order: ProfileOrder | None) -> None:
        """There are no other ranks to tell."""

    def close(self) -> None:
        return None
