"""Rank 0's end of a drafter that ranks share: the others are told, and each does its part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from kdray.core.plan import AcceptedPaths, Candidates, StepPlan
from kdray.model.drafter import DFlashDrafter
from kdray.model.synthetic_drafter import SyntheticDrafter
from kdray.verifier.rank_group import RankGroup


class SharedDrafter:
    """Drafts as rank 0's part does, once the group knows of it (a Drafter and a DeviceDrafter).

    What a step committed is learnt where the group applies the commit. Device rounds need nobody
    told: they are the same on all ranks.
    """

    def __init__(self, drafter: DFlashDrafter | SyntheticDrafter, group: RankGroup) -> None:
        self._drafter = drafter
        self._group = group
        self.depth, self.taps = drafter.depth, drafter.taps

    def propose(self, plan: StepPlan, roots: Tensor) -> Candidates:
        self._group.order_draft(plan)
        return self._drafter.propose(plan, roots)

    def extend(
        self, plan: StepPlan, paths: AcceptedPaths, features: Tensor, row_start: Sequence[int]
    ) -> None:
        self._group.behind_commit(partial(self._drafter.extend, plan, paths, features, row_start))

    def propose_on_device(
        self, roots: Tensor, root_position: Tensor, page_table: Tensor
    ) -> Candidates:
        return self._drafter.propose_on_device(roots, root_position, page_table)

    def extend_on_device(
        self, paths: AcceptedPaths, features: Tensor, root_position: Tensor, page_table: Tensor
    ) -> None:
        self._drafter.extend_on_device(paths, features, root_position, page_table)
