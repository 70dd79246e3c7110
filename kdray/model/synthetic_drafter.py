"""A drafter whose candidates carry the chances they are assumed to have: for benchmarks alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdray.core.acceptance import AcceptanceProfile
from kdray.core.plan import AcceptedPaths, Candidates, StepPlan
from kdray.core.tree import ABSENT
from kdray.model.drafter import DFlashDrafter


class SyntheticDrafter:
    """Drafts as the drafter below it, at its cost; trees on the device take the profile's shape.

    Of untrained weights all candidates are alike, and trees would be as wide as they are many.
    """

    def __init__(self, drafter: DFlashDrafter, profile: AcceptanceProfile) -> None:
        self._drafter = drafter
        self.depth, self.taps = drafter.depth, drafter.taps
        self._known = torch.from_numpy(profile.scores()).to(drafter.cache[0].device)

    def propose(self, plan: StepPlan, roots: Tensor) -> Candidates:
        return self._drafter.propose(plan, roots)

    def propose_on_device(
        self, roots: Tensor, root_position: Tensor, page_table: Tensor
    ) -> Candidates:
        drafted = self._drafter.propose_on_device(roots, root_position, page_table)
        score = torch.full_like(drafted.score, ABSENT)
        width = min(score.shape[2], self._known.shape[1])
        score[:, :, :width] = self._known[:, :width]
        return Candidates(token=drafted.token, score=score)

    def extend(
        self, plan: StepPlan, paths: AcceptedPaths, features: Tensor, row_start: Sequence[int]
    ) -> None:
        self._drafter.extend(plan, paths, features, row_start)

    def extend_on_device(
        self, paths: AcceptedPaths, features: Tensor, root_position: Tensor, page_table: Tensor
    ) -> None:
        self._drafter.extend_on_device(paths, features, root_position, page_table)
