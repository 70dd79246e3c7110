"""Whether a rank has room on its card, and for how many KV pages where nobody said.

All ranks hold the same pages, so all must decide alike. Each measures its own card, all learn all
measures, and each makes every rank's plan from them: the same plans, so the same decision or the
same refusal everywhere, before any weight is loaded.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from kdray.cards import Card, card_found
from kdray.config import EngineConfig
from kdray.facts import EngineFacts, longest_within, pages_of_one
from kdray.memory_plan import MemoryPlan, planned_start
from kdray.model.parallel import Collectives, Shard, SoloCollectives

_log = logging.getLogger(__name__)


def settle_pages(
    config: EngineConfig,
    facts: EngineFacts,
    shard: Shard | None = None,
    collectives: Collectives | None = None,
) -> EngineFacts:
    """The facts with the pages that every rank takes; this rank's plan goes to the log.

    Measured once and before the rank takes anything: pages may take the plan's last byte, and what
    a later look finds taken by the rank itself is in the plan already. Where the pages were left
    open all ranks call it together. Raises ConfigError where a rank does not fit; where pages were
    left open, on all ranks.
    """
    shard = shard or Shard()
    gc.collect()  # an engine before this one may still lie in a cycle
    own = card_found(facts.device, config.tp)
    if facts.pages_by_room:
        cards = cards_of_all(own, facts.device, shard, collectives or SoloCollectives())
        facts = _within(config, facts, cards, speaks=shard.rank == 0)
    plan = planned_start(config, facts).plan(shard.rank, own)
    _log.info("%s", plan.text())
    plan.check()
    return facts


def _within(
    config: EngineConfig, facts: EngineFacts, cards: Sequence[Card], *, speaks: bool
) -> EngineFacts:
    planned = planned_start(config, facts)
    plans = [planned.plan(rank, card) for rank, card in enumerate(cards)]
    count = common_pages(plans, facts.num_pages)
    if speaks:
        _log.info("%s", decision(plans, count))
        if count < pages_of_one(config, facts.max_model_len):
            _log.warning(
                "a request of max_model_len %s does not fit in them: the most that one can take is "
                "%s tokens, prompt and output",
                f"{facts.max_model_len:,}",
                f"{longest_within(config, count):,}",
            )
    return replace(facts, num_pages=count, pages_by_room=False)


def cards_of_all(
    own: Card, device: torch.device, shard: Shard, collectives: Collectives
) -> list[Card]:
    """Every rank's card, by its number, under the name of the own one."""
    mine = torch.tensor([own.total, own.taken], device=device)
    measures = collectives.all_gather(mine).view(shard.size, 2).tolist()
    return [Card(own.name, total, taken) for total, taken in measures]


def common_pages(plans: Sequence[MemoryPlan], most: int) -> int:
    """As many as fit into every rank's plan, `most` at most. ConfigError where one has no room."""
    fullest = _fullest(plans)
    fullest.check()
    return min(fullest.pages, most)


def decision(plans: Sequence[MemoryPlan], count: int) -> str:
    """On one line, with its reason."""
    fullest = _fullest(plans)
    of = f" on rank {fullest.rank}, which has the least" if len(plans) > 1 else ""
    why = f"all the room there is{of}" if count == fullest.pages else "all that can be of use"
    size = fullest.page_size
    return f"KV pages: {count:,} of {size} tokens ({count * size:,} tokens), {why}"


def _fullest(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    return min(plans, key=lambda plan: plan.pages)
