"""Who runs in the next step, with which pages; and what a step's result means for each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kdray.core.budget import Speculation
from kdray.core.pages import PageAllocator
from kdray.core.plan import PlannedRequest, RequestResult, StepPlan, StepResult
from kdray.core.request import Request, RequestStatus
from kdray.core.sampling import adjusts
from kdray.driver.growth import RequestOutput, broken, grow
from kdray.driver.limits import Limits, refuse_what_never_runs
from kdray.driver.roster import Roster, held_slot

__all__ = ["AheadStep", "Limits", "RequestOutput", "Scheduler", "held_slot"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AheadStep:
    """A step of decoding requests that the device knows more of than the host.

    budgets   draft nodes wanted, a request each
    pages     page tables that cover wherever the requests may stand
    """

    step: int
    requests: tuple[Request, ...]
    budgets: tuple[int, ...]
    pages: tuple[NDArray[np.int32], ...]


class Scheduler:
    """Continuous batching: admit, chunk prompts, run, retire, preempt by recompute.

    Between steps every running request whose prompt is cached has exactly one token without KV: the
    root of its next tree. Pages are reserved for the worst case of a step before it is planned, so
    a step never runs out. When pages run short, the request admitted last gives its pages back and
    starts over from its own tokens; the oldest one always gets on.

    With `runs_ahead`, decoding requests whose draws ask nothing of the host are planned by
    schedule_ahead instead, with at most one of their steps in flight; reserve_running comes first.
    Nothing in flight is ever preempted: where pages are short, the step is collected before.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        pages: PageAllocator,
        speculation: Speculation,
        runs_ahead: bool = False,
    ) -> None:
        self.limits = limits
        self.pages = pages
        self._roster = Roster(pages, limits.max_requests)
        self._speculation = speculation
        self._runs_ahead = runs_ahead
        self._most_drafts = speculation.draft_nodes(limits.max_model_len)
        self._most_ahead = speculation.depth + 1 if runs_ahead else 0  # tokens of a step in flight
        self._step = 0

    @property
    def num_waiting(self) -> int:
        return self._roster.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_admissible(self) -> int:
        """Of those who wait, how many have a slot."""
        return self._roster.num_admissible

    @property
    def num_preemptions(self) -> int:
        return self._roster.num_preemptions

    def validate(self, request: Request) -> None:
        """Raises InvalidRequest for what can never run, with the figures. From any thread."""
        self._roster.refuse_known(request)
        most_places = self._worst_case(request.max_total)
        refuse_what_never_runs(request, self.limits, self.pages, most_places)

    def add(self, request: Request) -> None:
        """Queue a request that validate() has passed."""
        self._roster.queue(request)
        request.runs_ahead = self._runs_ahead and not adjusts(request.sampling)

    def abort(self, request_id: str) -> bool:
        """Forget a request at once, wherever it is; False where it is not known (any more)."""
        return self._roster.abort(request_id)

    def schedule(self, *, decodes: bool = True, admits: bool = True) -> StepPlan | None:
        """The next step's plan; None where there is nothing to do.

        decodes: False leaves out requests whose prompt is cached; they have a turn later
        admits: False leaves those who wait, unless there is a step that they can join
        """
        planned = self._plan_running(decodes)
        if admits or planned:
            planned += self._admit(sum(len(p.known) for p in planned if len(p.known) > 1))
        if not planned:
            return None
        self._step += 1
        return StepPlan(step=self._step, requests=tuple(planned))

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Append what each request gained, retire what ended."""
        running = {request.request_id: request for request in self._roster.running}
        outputs = []
        for planned, gained in zip(plan.requests, result.requests, strict=True):
            request = running.get(planned.request_id)
            if request is None:
                continue  # aborted while the step ran
            # The bonus token has no KV yet, so a step caches its known tokens and its drafts.
            request.num_cached += len(planned.known) + max(len(gained.tokens) - 1, 0)
            if gained.tokens or gained.is_broken:
                outputs.append(self._grow(request, gained))
        return outputs

    @property
    def most_places(self) -> int:
        """Token places a request can ever touch: what its page table must have room for."""
        return self._worst_case(self.limits.max_model_len)

    def pages_short(self) -> bool:
        """Whether the running requests' next steps need more pages than are free."""
        wanted = sum(
            self.pages.missing(request.request_id, self._worst_case(len(request.tokens)))
            for request in self._outgrown()
        )
        return wanted > self.pages.num_free

    def reserve_running(self) -> None:
        """Pages for everybody's next step, oldest first; younger requests may lose theirs."""
        for request in self._outgrown():
            if request.status is RequestStatus.RUNNING:
                self._roster.reserve(request, self._worst_case(len(request.tokens)))

    def schedule_ahead(self) -> AheadStep | None:
        """The next step of the requests that run ahead; None where there are none.

        A request that the step in flight is sure to end is left out.
        """
        ready = [
            request
            for request in self._roster.running
            if request.runs_ahead
            and len(request.tokens) == request.num_cached + 1
            and len(request.tokens) + request.num_in_flight < request.max_total
        ]
        if not ready:
            return None
        budgets = tuple([self._budget(request) for request in ready])
        for request in ready:
            request.num_in_flight += 1
        self._step += 1
        table = self.pages.page_table
        return AheadStep(
            step=self._step,
            requests=tuple(ready),
            budgets=budgets,
            pages=tuple([table(request.request_id) for request in ready]),
        )

    def update_ahead(
        self, step: AheadStep, results: Sequence[RequestResult]
    ) -> list[RequestOutput]:
        """As update; requests that ended while the step ran are passed over."""
        outputs = []
        for request, gained in zip(step.requests, results, strict=True):
            request.num_in_flight -= 1
            if request.status is RequestStatus.RUNNING:
                request.num_cached += len(gained.tokens)
                outputs.append(self._grow(request, gained))
        return outputs

    def _grow(self, request: Request, gained: RequestResult) -> RequestOutput:
        """A broken request ends alone, with an error."""
        if gained.is_broken:
            output = broken(request)
        else:
            output = grow(request, gained.tokens, gained.num_drafted)
        if output.finish_reason is not None:
            self._roster.retire(request, output.finish_reason)
        return output

    def _outgrown(self) -> list[Request]:
        """Running requests whose next step may reach beyond their pages."""
        more, covered = self._worst_case(0), self.pages.covered
        return [
            r for r in self._roster.running if len(r.tokens) + more > covered.get(r.request_id, 0)
        ]

    def _plan_running(self, decodes: bool) -> list[PlannedRequest]:
        chunk_left = self.limits.prefill_chunk
        planned: list[PlannedRequest] = []
        for request in list(self._roster.running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older one a moment ago
            if request.num_uncached == 1 and (request.runs_ahead or not decodes):
                continue  # schedule_ahead's, or another time's
            num_known = min(request.num_uncached, chunk_left if request.num_uncached > 1 else 1)
            places = self._worst_case(request.num_cached + num_known)
            if num_known == 0 or not self._roster.reserve(request, places):
                continue
            chunk_left -= num_known if request.num_uncached > 1 else 0
            planned.append(self._planned(request, num_known))
        return planned

    def _admit(self, chunk_used: int) -> list[PlannedRequest]:
        chunk_left = self.limits.prefill_chunk - chunk_used
        planned = []
        while chunk_left > 0 and (waiting := self._roster.next_in_line) is not None:
            request = self._roster.admit(self._worst_case(len(waiting.tokens)))
            if request is None:
                break
            num_known = min(request.num_uncached, chunk_left)
            chunk_left -= num_known
            planned.append(self._planned(request, num_known))
        return planned

    def _planned(self, request: Request, num_known: int) -> PlannedRequest:
        end = request.num_cached + num_known
        tokens = request.tokens
        return PlannedRequest(
            request_id=request.request_id,
            slot=held_slot(request),
            num_cached=request.num_cached,
            known=np.array(tokens[request.num_cached : end], dtype=np.int32),
            budget=self._budget(request) if request.num_uncached == 1 else 0,
            pages=self.pages.page_table(request.request_id),
            samples=end == len(tokens),
            sampling=request.sampling,
            seed=request.seed,
            num_prompt=len(request.prompt),
            end_token_ids=request.end_token_ids,
            history=(
                np.array(tokens[:end], dtype=np.int32) if request.sampling.uses_history else None
            ),
        )

    def _budget(self, request: Request) -> int:
        """Draft nodes of the next tree; none where the deepest would not fit the model."""
        in_flight = self._most_ahead * request.num_in_flight
        if len(request.tokens) + in_flight + self._speculation.depth > self.limits.max_model_len:
            return 0
        left = request.max_total - len(request.tokens)
        if left > self._speculation.depth:
            return self._most_drafts
        return self._speculation.draft_nodes(left)

    def _worst_case(self, num_tokens: int) -> int:
        """Token places a request of num_tokens can touch in its next step, wherever it stands."""
        return num_tokens + self._most_ahead + self._most_drafts
