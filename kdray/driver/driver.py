"""The driver: runs one speculative step after another."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kdray.core.budget import Speculation
from kdray.core.plan import (
    AcceptedPaths,
    Candidates,
    DraftTrees,
    RequestResult,
    StepPlan,
    StepResult,
    Verified,
    VerifierGroup,
)
from kdray.core.request import Request
from kdray.driver.ahead import AheadDecoder, InFlight
from kdray.driver.running import on_device
from kdray.driver.scheduler import AheadStep, RequestOutput, Scheduler
from kdray.driver.stages import StageClock
from kdray.driver.turns import HostTurns, PromptTurns
from kdray.kernels.ops import Ops
from kdray.kernels.page_tables import upload
from kdray.model.drafter import Drafter
from kdray.profiling.recorder import Recorder
from kdray.profiling.session import ProfileSession


@dataclass(slots=True)
class DriverCounters:
    """Totals since the start. prompt_steps are those of the steps that ran prompts, from the host;
    accept_lengths counts speculative steps of single requests, and tree_nodes their trees by draft
    nodes."""

    steps: int = 0
    prompt_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    verified_rows: int = 0
    accept_lengths: Counter[int] = field(default_factory=Counter)
    tree_nodes: Counter[int] = field(default_factory=Counter)


class Driver:
    """Owns the drafter, the tree builder, the acceptance and the schedule; talks to the verifiers.

    With a decoder, requests that decode run ahead of the host in device rounds; only prompts, and
    draws that need the host, run through round(). Not thread-safe: one thread submits, steps and
    aborts.
    """

    def __init__(
        self,
        *,
        verifiers: VerifierGroup,
        drafter: Drafter | None,
        ops: Ops,
        scheduler: Scheduler,
        speculation: Speculation,
        device: torch.device,
        decoder: AheadDecoder | None = None,
    ) -> None:
        self.scheduler = scheduler
        recorder = Recorder(rank=0)
        self.clock = StageClock(recorder)
        self.profile = ProfileSession(recorder, verifiers)
        self.counters = DriverCounters()
        self.verifiers = verifiers
        self._drafter = drafter
        self._ops = ops
        self._depth = speculation.depth
        self._device = device
        self._decoder = decoder
        self.prompt_turns = PromptTurns()
        self.host_turns = HostTurns()
        self._flights: deque[InFlight] = deque()  # launched, oldest first; one between two steps

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest where it can never run."""
        self.scheduler.validate(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput] | None:
        """One round for every request that can run; None where there is nothing to do."""
        start_ns = time.time_ns()
        if self._decoder is None:
            outputs = self._step_planned()
        else:
            with on_device(self._device):
                outputs = self._step_ahead(self._decoder)
        if outputs is not None:
            self.profile.stepped(start_ns)
        return outputs

    def _step_ahead(self, decoder: AheadDecoder) -> list[RequestOutput] | None:
        """Launch the next step of those who decode, run the others', read the one before.

        A step stays among the flights until its outcome is in the scheduler, so that an
        interruption loses nothing.
        """
        most = 0 if self.scheduler.pages_short() else 1
        outputs = self._collect(decoder, leave=most)
        with self.clock.stage("schedule"):
            self.scheduler.reserve_running()
            ahead = self.scheduler.schedule_ahead()
        if ahead is not None:
            with self.clock.stage("launch"):
                self._flights.append(decoder.launch(ahead))
        decoding = 0 if ahead is None else len(ahead.requests)
        planned = self._step_planned(
            decodes=decoding == 0 or self.host_turns.is_due(),
            admits=self.prompt_turns.is_due(
                waiting=self.scheduler.num_admissible, decoding=decoding
            ),
        )
        if planned is None and not self._flights and not outputs:
            return None
        outputs += planned or []
        # Behind a step from the host nothing is in flight any more: its result came last.
        leave = 1 if planned is None and ahead is not None else 0
        return outputs + self._collect(decoder, leave=leave)

    def _step_planned(
        self, *, decodes: bool = True, admits: bool = True
    ) -> list[RequestOutput] | None:
        with self.clock.stage("schedule"):
            plan = self.scheduler.schedule(decodes=decodes, admits=admits)
        if plan is None:
            return None
        with ExitStack() as turns:
            if plan.decodes:
                turns.enter_context(self.host_turns.turn())
            if plan.prompts:
                turns.enter_context(self.prompt_turns.turn())
            result = self.round(plan)
        with self.clock.stage("schedule"):
            outputs = self.scheduler.update(plan, result)
            self._count(plan, outputs)
            self._count_trees(result.requests)
        return outputs

    def _collect(self, decoder: AheadDecoder, *, leave: int) -> list[RequestOutput]:
        """What the oldest flights gave, until so many are left."""
        outputs: list[RequestOutput] = []
        while len(self._flights) > leave:
            flight = self._flights[0]
            with self.clock.stage("wait"):
                results = decoder.collect(flight)
            with self.clock.stage("schedule"):
                self._count_ahead(flight.step, results)
                outputs += self.scheduler.update_ahead(flight.step, results)
                self._flights.popleft()
        self._count_outputs(outputs)
        return outputs

    def round(self, plan: StepPlan) -> StepResult:
        """Draft, build, verify, accept, commit."""
        roots = self._roots(plan)
        with self.clock.stage("draft"):
            candidates = self._propose(plan, roots)
        with self.clock.stage("build"):
            trees = self._ops.build_trees(candidates, roots, [r.budget for r in plan.requests])
        with self.clock.stage("verify"):
            verified = self.verifiers.verify(plan, trees)
        with self.clock.stage("accept"):
            paths = self._ops.accept_paths(trees, verified.token, self._depth)
        with self.clock.stage("commit"):
            self.verifiers.commit(paths)
            self._extend(plan, trees, paths, verified)
            return _result(plan, trees, paths, verified.broken)

    def close(self) -> None:
        self.profile.end()
        self.profile.join()
        self.verifiers.close()

    def _roots(self, plan: StepPlan) -> Tensor:
        return upload(plan.roots, self._device)

    def _propose(self, plan: StepPlan, roots: Tensor) -> Candidates:
        if self._drafter is None or plan.max_budget == 0:
            return _no_candidates(len(plan.requests), self._device)
        return self._drafter.propose(plan, roots)

    def _extend(
        self, plan: StepPlan, trees: DraftTrees, paths: AcceptedPaths, verified: Verified
    ) -> None:
        if self._drafter is not None:
            row_start = plan.row_start(trees.num_nodes.tolist())
            self._drafter.extend(plan, paths, verified.features, row_start)

    def _count(self, plan: StepPlan, outputs: Sequence[RequestOutput]) -> None:
        counters = self.counters
        counters.steps += 1
        counters.prompt_steps += plan.prompts
        for request in plan.requests:
            counters.prompt_tokens += max(
                0, min(request.num_prompt - request.num_cached, len(request.known))
            )
            counters.verified_rows += len(request.known) + request.budget
        self._count_outputs(outputs)

    def _count_ahead(self, step: AheadStep, results: Sequence[RequestResult]) -> None:
        """A prompt's last token may be the root of the first tree."""
        counters = self.counters
        counters.steps += 1
        counters.verified_rows += sum(1 + result.num_drafted for result in results)
        self._count_trees(results)
        counters.prompt_tokens += sum(r.num_cached < len(r.prompt) for r in step.requests)

    def _count_trees(self, results: Sequence[RequestResult]) -> None:
        drafted = (result.num_drafted for result in results)
        self.counters.tree_nodes.update(nodes for nodes in drafted if nodes)

    def _count_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        counters = self.counters
        for output in outputs:
            counters.generated_tokens += len(output.token_ids)
            if output.accept_length is not None:
                counters.accept_lengths[output.accept_length] += 1


def _no_candidates(num_requests: int, device: torch.device) -> Candidates:
    empty = torch.zeros(num_requests, 0, 0, dtype=torch.int32, device=device)
    return Candidates(token=empty, score=empty)


def _result(
    plan: StepPlan, trees: DraftTrees, paths: AcceptedPaths, broken: frozenset[int]
) -> StepResult:
    """The accepted draft tokens and the bonus token of every request that sampled."""
    token, node = trees.token.tolist(), paths.node.tolist()
    length, bonus, num_nodes = paths.length.tolist(), paths.bonus.tolist(), trees.num_nodes.tolist()
    results = []
    for r, request in enumerate(plan.requests):
        drafts = [token[r][i] for i in node[r][1 : length[r]]]
        gained = (*drafts, bonus[r]) if request.samples else ()
        results.append(
            RequestResult(
                request_id=request.request_id,
                tokens=gained,
                num_drafted=num_nodes[r] - 1,
                is_broken=r in broken,
            )
        )
    return StepResult(step=plan.step, requests=tuple(results))
