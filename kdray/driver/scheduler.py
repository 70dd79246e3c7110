"""Who runs in the next step, with which pages; and what a step's result means for each request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kdray.core.budget import Speculation
from kdray.core.pages import PageAllocator
from kdray.core.plan import PlannedRequest, RequestResult, StepPlan, StepResult
from kdray.core.request import FinishReason, Request, RequestStatus
from kdray.core.sampling import adjusts
from kdray.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Facts the scheduler keeps to.

    max_requests     requests running at the same time
    max_model_len    most tokens of one request, prompt and output
    prefill_chunk    most prompt tokens in one step, over all requests
    vocab_size       token ids are below it
    """

    max_requests: int
    max_model_len: int
    prefill_chunk: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one request gained in a step, after end tokens and limits were applied.

    accept_length   tokens gained by a speculative step: accepted drafts + 1, less where the request
                    ended before them; None where nothing was drafted
    """

    request_id: str
    token_ids: tuple[int, ...]
    accept_length: int | None
    finish_reason: FinishReason | None


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
        self.num_preemptions = 0
        self._speculation = speculation
        self._runs_ahead = runs_ahead
        self._most_drafts = speculation.draft_nodes(limits.max_model_len)
        self._most_ahead = speculation.depth + 1 if runs_ahead else 0  # tokens of a step in flight
        self._waiting: deque[Request] = deque()
        self._ids: set[str] = set()  # of waiting and running requests
        self._running: list[Request] = []  # in order of admission
        self._free_slots = list(range(limits.max_requests))[::-1]
        self._step = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def validate(self, request: Request) -> None:
        """Raises InvalidRequest for what can never run, with the figures. From any thread."""
        self._refuse_known(request)
        limits = self.limits
        for param, tokens in _tokens_named(request):
            if not all(0 <= token < limits.vocab_size for token in tokens):
                raise InvalidRequest(
                    f"{param}: token ids must be from 0 to {limits.vocab_size - 1}", param=param
                )
        if request.max_total > limits.max_model_len:
            raise InvalidRequest(
                f"{len(request.prompt)} prompt tokens and max_tokens {request.sampling.max_tokens} "
                f"make {request.max_total}; the most this engine takes is {limits.max_model_len}",
                param="max_tokens",
            )
        needed = self.pages.pages_for(self._worst_case(request.max_total))
        if needed > self.pages.num_pages:
            raise InvalidRequest(
                f"the request can grow to {needed} KV pages of {self.pages.page_size} tokens; the "
                f"engine has {self.pages.num_pages}",
                param="max_tokens",
            )

    def add(self, request: Request) -> None:
        """Queue a request that validate() has passed."""
        self._refuse_known(request)
        self._ids.add(request.request_id)
        request.runs_ahead = self._runs_ahead and not adjusts(request.sampling)
        self._waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Forget a request at once, wherever it is; False where it is not known (any more)."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                self._finish(request, "abort")
                return True
        for request in self._running:
            if request.request_id == request_id:
                self._retire(request, "abort")
                return True
        return False

    def schedule(self) -> StepPlan | None:
        """The next step's plan; None where there is nothing to do."""
        planned = self._plan_running()
        planned += self._admit(sum(len(p.known) for p in planned if len(p.known) > 1))
        if not planned:
            return None
        self._step += 1
        return StepPlan(step=self._step, requests=tuple(planned))

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Append what each request gained, retire what ended."""
        running = {request.request_id: request for request in self._running}
        outputs = []
        for planned, gained in zip(plan.requests, result.requests, strict=True):
            request = running.get(planned.request_id)
            if request is None:
                continue  # aborted while the step ran
            # The bonus token has no KV yet, so a step caches its known tokens and its drafts.
            request.num_cached += len(planned.known) + max(len(gained.tokens) - 1, 0)
            if gained.tokens:
                outputs.append(self._append(request, gained.tokens, gained.num_drafted))
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
                self._reserve(request, self._worst_case(len(request.tokens)))

    def schedule_ahead(self) -> AheadStep | None:
        """The next step of the requests that run ahead; None where there are none.

        A request that the step in flight is sure to end is left out.
        """
        ready = [
            request
            for request in self._running
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
        """As update; requests that ended while the step ran are passed over.

        Raises ValueError where a running request's logits were all broken.
        """
        outputs = []
        for request, gained in zip(step.requests, results, strict=True):
            request.num_in_flight -= 1
            if request.status is RequestStatus.RUNNING:
                if gained.is_broken:
                    raise ValueError(
                        f"request {request.request_id}: no finite logit is left to draw from; "
                        "the model's weights or its input are broken"
                    )
                request.num_cached += len(gained.tokens)
                outputs.append(self._append(request, gained.tokens, gained.num_drafted))
        return outputs

    def _refuse_known(self, request: Request) -> None:
        if request.request_id in self._ids:
            raise InvalidRequest(
                f"request_id {request.request_id!r} belongs to a request that is still open; "
                "pages and outputs go by it, so give every request its own",
                param="request_id",
            )

    def _outgrown(self) -> list[Request]:
        """Running requests whose next step may reach beyond their pages."""
        more, covered = self._worst_case(0), self.pages.covered
        return [r for r in self._running if len(r.tokens) + more > covered.get(r.request_id, 0)]

    def _plan_running(self) -> list[PlannedRequest]:
        chunk_left = self.limits.prefill_chunk
        planned: list[PlannedRequest] = []
        for request in list(self._running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older one a moment ago
            if request.runs_ahead and request.num_uncached == 1:
                continue  # schedule_ahead's
            num_known = min(request.num_uncached, chunk_left if request.num_uncached > 1 else 1)
            places = self._worst_case(request.num_cached + num_known)
            if num_known == 0 or not self._reserve(request, places):
                continue
            chunk_left -= num_known if request.num_uncached > 1 else 0
            planned.append(self._planned(request, num_known))
        return planned

    def _admit(self, chunk_used: int) -> list[PlannedRequest]:
        chunk_left = self.limits.prefill_chunk - chunk_used
        planned = []
        while self._waiting and self._free_slots and chunk_left > 0:
            request = self._waiting[0]
            if not self.pages.reserve(request.request_id, self._worst_case(len(request.tokens))):
                break  # full is a wait: whoever comes first is served first
            self._waiting.popleft()
            request.slot = self._free_slots.pop()
            request.status = RequestStatus.RUNNING
            self._running.append(request)
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

    def _reserve(self, request: Request, places: int) -> bool:
        """Pages for so many token places, taken from younger requests if need be."""
        while not self.pages.reserve(request.request_id, places):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_cached = 0
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _append(self, request: Request, tokens: Sequence[int], num_drafted: int) -> RequestOutput:
        kept, reason = _until_end(request, tokens)
        request.tokens.extend(kept)
        accept_length = len(kept) if num_drafted else None
        if accept_length is not None:
            request.accept_lengths.append(accept_length)
        if reason is not None:
            self._retire(request, reason)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=tuple(kept),
            accept_length=accept_length,
            finish_reason=reason,
        )

    def _retire(self, request: Request, reason: FinishReason) -> None:
        self._release(request)
        self._finish(request, reason)

    def _release(self, request: Request) -> None:
        self.pages.release(request.request_id)
        self._free_slots.append(held_slot(request))
        request.slot = None
        self._running.remove(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._ids.discard(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason


def _tokens_named(request: Request) -> Iterator[tuple[str, Iterable[int]]]:
    """Every list of token ids that a client wrote, under the client's name for it."""
    yield "prompt", request.prompt
    yield "logit_bias", (token for token, _ in request.sampling.logit_bias)
    yield "stop_token_ids", request.sampling.stop_token_ids


def _until_end(request: Request, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """The tokens up to and including the first that ends the request, and why it ended."""
    room = request.max_total - len(request.tokens)
    if len(tokens) < room and request.end_token_ids.isdisjoint(tokens):
        return list(tokens), None
    first = request.num_output
    for index, token in enumerate(tokens[:room]):
        if token in request.end_token_ids and first + index + 1 > request.sampling.min_tokens:
            return list(tokens[: index + 1]), "stop"
    if len(tokens) >= room:
        return list(tokens[:room]), "length"
    return list(tokens), None


def held_slot(request: Request) -> int:
    """The slot of a running request."""
    assert request.slot is not None, "a running request holds a slot"
    return request.slot
