"""An engine's drafter: a rank's part of it, or all of it, and what leads it on rank 0."""

from __future__ import annotations

import logging

from kdray.config import EngineConfig
from kdray.core.plan import VerifierGroup
from kdray.facts import EngineFacts
from kdray.kernels.ops import Ops
from kdray.memory_plan import SPARE_PAGES
from kdray.model.drafter import DFlashDrafter, Drafter
from kdray.model.synthetic_drafter import SyntheticDrafter
from kdray.model.target import TargetModel
from kdray.verifier.rank_group import RankGroup
from kdray.verifier.shared_drafter import SharedDrafter

_log = logging.getLogger(__name__)


def load_drafter(
    config: EngineConfig, facts: EngineFacts, ops: Ops, target: TargetModel
) -> DFlashDrafter | None:
    """This rank's part of the drafter; all of it where one rank drafts. None: there is none.

    A rank that drafts alone among several reads the target's tables anew: it has a part of them.
    """
    if facts.drafter is None:
        return None
    is_alone = facts.draft_ranks == 1 < target.shard.size
    if is_alone and config.draft_tp is None:
        _log.info("rank 0 drafts alone: %d ranks cannot share this drafter evenly", config.tp)
    return DFlashDrafter.load(
        facts.drafter,
        facts.target if is_alone else target,
        ops=ops,
        candidates=config.candidates if config.mode == "tree" else 1,
        page_size=config.page_size,
        num_pages=facts.num_pages + SPARE_PAGES,
        dtype=facts.dtype,
        device=facts.device,
        weights=config.draft_weights,
        load_format=config.load_format,
    )


def leading_drafter(
    facts: EngineFacts, part: DFlashDrafter | None, group: VerifierGroup
) -> Drafter | None:
    """What the driver drafts with: rank 0's part, which has the others draft along."""
    if part is None:
        return None
    drafter = part if facts.acceptance is None else SyntheticDrafter(part, facts.acceptance)
    if facts.draft_ranks == 1:
        return drafter
    assert isinstance(group, RankGroup), "who shares a drafter is a group of ranks"
    return SharedDrafter(drafter, group)
