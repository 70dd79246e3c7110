"""A group of one: the verifier in the driver's own process."""

from __future__ import annotations

from kdray.core.plan import AcceptedPaths, DraftTrees, StepPlan, Verified
from kdray.verifier.verifier import Verifier


class LocalGroup:
    """One rank, no messages: for one GPU, for notebooks and for tests."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def verify(self, plan: StepPlan, trees: DraftTrees) -> Verified:
        return self._verifier.verify(plan, trees)

    def commit(self, paths: AcceptedPaths) -> None:
        self._verifier.commit(paths)

    def close(self) -> None:
        return None
