"""Ranks that share the drafter, step by step: steps from the host, pages that run out, requests
that leave, and the order in which the ranks do things."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jobs.traffic import Visit
from kdray.config import EngineConfig
from kdray.core.plan import (
    AcceptedPaths,
    Candidates,
    DraftTrees,
    PlannedRequest,
    RoundOrder,
    StepPlan,
    Verified,
)
from kdray.core.request import SamplingParams
from kdray.kernels.ops import load_ops
from kdray.profiling.recorder import Recorder
from kdray.verifier.rank_group import RankGroup, RankWorker
from kdray.verifier.shared_drafter import SharedDrafter
from tests.thread_ranks import Meeting, QueueChannel, ThreadCollectives
from tests.verifier.test_follower import config_of, on_one_rank, on_ranks, visits_of


def staying(count: int, **sampling: Any) -> list[Visit]:
    """Visits that nobody leaves; each fourth one's draws are changed by `sampling`."""
    visits = [replace(visit, patience=None) for visit in visits_of(count)]
    for n in range(0, count, 4):
        visits[n] = replace(visits[n], sampling=replace(visits[n].sampling, **sampling))
    return visits


VERBS = ("draft", "verify", "commit", "extend", "round")
HOST_DRAWS = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"logit_bias": ((65, 2.0), (70, -3.0))},
    "min_tokens": {"min_tokens": 12, "ignore_eos": False},
}


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("kind", HOST_DRAWS)
def test_draws_on_the_host_say_what_one_rank_says(kind: str, runs_ahead: bool) -> None:
    """Beside others that run ahead, or none that do."""
    visits = staying(8, **HOST_DRAWS[kind])
    config = config_of(tp=2, budget=7)
    replies, driver = on_ranks(config, visits, runs_ahead=runs_ahead)
    assert replies == on_one_rank(config_of(mode="plain"), visits)
    assert driver.clock.seconds["draft"] > 0
    assert max(driver.counters.accept_lengths) > 3


@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_drafts_of_host_steps_are_those_of_one_rank(weights: str) -> None:
    """All of them from the host, in the same steps with the same trees."""
    visits = [
        replace(visit, sampling=replace(visit.sampling, repetition_penalty=1.1))
        for visit in staying(6)
    ]
    config = config_of(tp=2, budget=7, draft_weights=weights)
    shared, together = on_ranks(config, visits, runs_ahead=False)
    alone, one = on_ranks(replace(config, draft_tp=1), visits, runs_ahead=False)
    assert shared == alone
    assert together.counters == one.counters
    assert max(together.counters.accept_lengths) > 3


def short_of_pages(**wishes: object) -> EngineConfig:
    return config_of(tp=2, budget=7, num_pages=14, prefill_chunk=32, **wishes)


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_requests_that_lose_their_pages_draft_on(runs_ahead: bool) -> None:
    """What a step taught the drafter lies in pages that are another's a moment later."""
    long = {"max_tokens": 60, "ignore_eos": True}
    visits = [
        replace(v, prompt=v.prompt[:60], sampling=replace(v.sampling, **long), pause=0)
        for v in staying(8, presence_penalty=0.2)
    ]
    shared, together = on_ranks(short_of_pages(), visits, runs_ahead=runs_ahead)
    assert together.scheduler.num_preemptions > 0
    assert shared == on_one_rank(config_of(mode="plain"), visits)
    if not runs_ahead:  # else the clock decides whose turn it is
        alone, one = on_ranks(short_of_pages(draft_tp=1), visits, runs_ahead=False)
        assert (alone, one.counters) == (shared, together.counters)


def test_requests_may_leave_between_any_two_steps() -> None:
    """Also while a commit waits, or amid a prompt."""
    visits = [replace(visit, patience=n % 5 or None) for n, visit in enumerate(visits_of(16))]
    config = config_of(tp=2, budget=7, prefill_chunk=16)
    shared, together = on_ranks(config, visits, runs_ahead=False)
    alone, one = on_ranks(replace(config, draft_tp=1), visits, runs_ahead=False)
    assert shared == alone and together.counters == one.counters
    assert {reply.finish_reason for reply in shared} >= {"abort", "length"}
    ahead, _ = on_ranks(config, visits, runs_ahead=True)
    plain = on_one_rank(config_of(mode="plain"), [replace(v, patience=None) for v in visits])
    for reply, whole in zip(ahead, plain, strict=True):
        told = reply.token_ids
        assert told == whole.token_ids[: len(told)]
        assert reply.finish_reason in ("abort", whole.finish_reason)


@dataclass
class Witness:
    """A rank's verifier, drafter and rounds that only say what they are told to do, and look
    whether all ranks do the same at the same time."""

    collectives: ThreadCollectives
    depth: int = 2
    taps: tuple[int, ...] = (0,)
    said: list[str] = field(default_factory=list)

    def say(self, verb: str, *numbers: int) -> None:
        mine = torch.tensor([VERBS.index(verb), *numbers])
        everybody = self.collectives.all_gather(mine).view(-1, len(mine))
        assert (everybody == mine).all(), f"{verb} {numbers} beside {everybody.tolist()}"
        self.said.append(" ".join([verb, *map(str, numbers)]))

    def propose(self, plan: StepPlan, roots: Tensor) -> Candidates:
        self.say("draft", plan.step, *roots.tolist())
        shape = (len(roots), self.depth, 1)
        return Candidates(
            token=torch.full(shape, 3, dtype=torch.int32),
            score=torch.full(shape, -9, dtype=torch.int32),
        )

    def verify(self, plan: StepPlan, trees: DraftTrees) -> Verified:
        self.say("verify", plan.step, int(trees.num_nodes.sum()))
        features = torch.full((plan.row_start(trees.num_nodes.tolist())[-1], 1), 0.5)
        return Verified(token=trees.token, features=features * plan.step, broken=frozenset())

    def commit(self, paths: AcceptedPaths) -> None:
        self.say("commit", *paths.bonus.tolist())

    def extend(
        self, plan: StepPlan, paths: AcceptedPaths, features: Tensor, row_start: Sequence[int]
    ) -> None:
        assert features.shape == (row_start[-1], 1) and (features == 0.5 * plan.step).all()
        self.say("extend", plan.step, *row_start, *paths.bonus.tolist())

    def run(self, order: RoundOrder) -> None:
        self.say("round", *order.slot.tolist())


def plan_of(step: int, *requests: tuple[int, int]) -> StepPlan:
    """requests: known tokens, the last being the step's number, and budget."""
    return StepPlan(
        step=step,
        requests=tuple(
            PlannedRequest(
                request_id=f"r{slot}",
                slot=slot,
                num_cached=4,
                known=np.full(known, step, dtype=np.int32),
                budget=budget,
                pages=np.arange(2, dtype=np.int32),
                samples=True,
                sampling=SamplingParams(),
                seed=0,
                num_prompt=4,
            )
            for slot, (known, budget) in enumerate(requests)
        ),
    )


def host_step(group: RankGroup, drafter: SharedDrafter, plan: StepPlan) -> None:
    """As the driver's round."""
    count, budgets = len(plan.requests), [request.budget for request in plan.requests]
    roots = torch.full((count,), plan.step, dtype=torch.int32)
    empty = torch.zeros(count, 0, 0, dtype=torch.int32)
    candidates = Candidates(token=empty, score=empty)
    if plan.max_budget:
        candidates = drafter.propose(plan, roots)
    trees = load_ops("cpu").build_trees(candidates, roots, budgets)
    verified = group.verify(plan, trees)
    node = torch.zeros(count, 3, dtype=torch.int32)
    paths = AcceptedPaths(node=node, length=torch.ones_like(roots), bonus=roots + 100)
    group.commit(paths)
    drafter.extend(plan, paths, verified.features, plan.row_start(trees.num_nodes.tolist()))


def test_the_ranks_do_the_same_in_the_same_order() -> None:
    """What a step committed is applied, and learnt, as the first thing of what comes next; the last
    step's is not."""
    meeting, channel = Meeting(2), QueueChannel(2)
    first, other = (Witness(ThreadCollectives(meeting, rank)) for rank in range(2))

    def lead() -> None:
        group = RankGroup(first, channel, first.collectives)  # type: ignore[arg-type]
        drafter = SharedDrafter(first, group)  # type: ignore[arg-type]
        host_step(group, drafter, plan_of(1, (3, 0), (1, 2)))
        group.profile(None)
        host_step(group, drafter, plan_of(2, (5, 0)))
        for slots in ((1, 0), (1,)):
            order = RoundOrder(size=(len(slots), 3), slot=np.array(slots, np.int32), tables=())
            group.order_round(order)
            first.run(order)
        host_step(group, drafter, plan_of(3, (1, 1), (1, 2), (2, 0)))
        group.profile(None)
        host_step(group, drafter, plan_of(4, (1, 2)))
        group.profile(None)
        group.close()

    def follow() -> int:
        worker = RankWorker(
            other,  # type: ignore[arg-type]
            channel.receiver(1),
            other.collectives,
            torch.device("cpu"),
            Recorder(1),
            rounds=other,  # type: ignore[arg-type]
            drafter=other,
        )
        return worker.run()

    with ThreadPoolExecutor(2) as pool:
        leading, following = pool.submit(lead), pool.submit(follow)
        leading.result()
        assert following.result() == 6
    assert first.said == other.said
    assert first.said == [
        *("draft 1 1 1", "verify 1 4"),
        *("commit 101 101", "extend 1 0 3 6 101 101", "verify 2 1"),
        *("commit 102", "extend 2 0 5 102", "round 1 0", "round 1"),
        *("draft 3 3 3 3", "verify 3 6"),
        *("commit 103 103 103", "extend 3 0 2 5 7 103 103 103", "draft 4 4", "verify 4 3"),
    ]
