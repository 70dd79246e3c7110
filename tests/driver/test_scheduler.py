"""The scheduler alone: a scripted target answers, pages are counted after every step."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdray.core.budget import Speculation
from kdray.core.pages import PageAllocator
from kdray.core.plan import RequestResult, StepPlan, StepResult
from kdray.core.request import Request, SamplingParams
from kdray.driver.scheduler import Limits, RequestOutput, Scheduler
from kdray.errors import InvalidRequest

END = 0
DEPTH = 4


def make_scheduler(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_requests: int = 4,
    prefill_chunk: int = 8,
    max_model_len: int = 64,
    budget: int = 6,
) -> Scheduler:
    return Scheduler(
        limits=Limits(
            max_requests=max_requests,
            max_model_len=max_model_len,
            prefill_chunk=prefill_chunk,
            vocab_size=1000,
        ),
        pages=PageAllocator(num_pages, page_size),
        speculation=Speculation(mode="tree", budget=budget, depth=DEPTH, candidates=4),
    )


def make_request(name: str, prompt_length: int, max_tokens: int, **sampling: object) -> Request:
    return Request(
        request_id=name,
        prompt=tuple(range(1, prompt_length + 1)),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        end_token_ids=frozenset({END}),
        seed=0,
    )


def truth(position: int) -> int:
    """The scripted target: the token at a position, never the end token."""
    return 100 + position % 800


def answer(plan: StepPlan, accept: random.Random) -> StepResult:
    """A step in which each request's draft is right for a random number of tokens."""
    results = []
    for planned in plan.requests:
        right = accept.randint(0, min(DEPTH, planned.budget))
        first = planned.root_position + 1
        tokens = tuple(truth(first + i) for i in range(right + 1)) if planned.samples else ()
        results.append(
            RequestResult(request_id=planned.request_id, tokens=tokens, num_drafted=planned.budget)
        )
    return StepResult(step=plan.step, requests=tuple(results))


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    owners: dict[int, str] = {}
    for planned in plan.requests:
        touched = planned.num_cached + len(planned.known) + planned.budget
        assert len(planned.pages) * scheduler.pages.page_size >= touched
        assert planned.budget == 0 or len(planned.known) == 1
        for page in planned.pages.tolist():
            assert owners.setdefault(page, planned.request_id) == planned.request_id
    slots = [planned.slot for planned in plan.requests]
    assert len(set(slots)) == len(slots)
    chunk = sum(len(p.known) for p in plan.requests if len(p.known) > 1)
    assert chunk <= scheduler.limits.prefill_chunk
    scheduler.pages.check()


def run(scheduler: Scheduler, accept: random.Random) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while (plan := scheduler.schedule()) is not None:
        check_plan(scheduler, plan)
        outputs += scheduler.update(plan, answer(plan, accept))
    return outputs


def test_a_request_gains_exactly_its_tokens_and_returns_its_pages() -> None:
    scheduler = make_scheduler()
    request = make_request("a", prompt_length=11, max_tokens=9)
    scheduler.add(request)
    outputs = run(scheduler, random.Random(0))
    gained = [token for output in outputs for token in output.token_ids]
    assert gained == [truth(p) for p in range(11, 20)]
    assert outputs[-1].finish_reason == "length"
    assert scheduler.pages.num_used == 0


def test_a_long_prompt_is_cut_into_chunks() -> None:
    scheduler = make_scheduler(prefill_chunk=8)
    scheduler.add(make_request("a", prompt_length=20, max_tokens=1))
    lengths = []
    while (plan := scheduler.schedule()) is not None:
        [planned] = plan.requests
        lengths.append((len(planned.known), planned.samples))
        scheduler.update(plan, answer(plan, random.Random(0)))
    assert lengths == [(8, False), (8, False), (4, True)]


def test_prompts_get_on_where_decoding_has_no_turn() -> None:
    scheduler = make_scheduler(prefill_chunk=8)
    for name, length in (("a", 5), ("b", 7)):
        scheduler.add(make_request(name, prompt_length=length, max_tokens=4))
    planned = []
    for decodes in (False, False, False, True):
        plan = scheduler.schedule(decodes=decodes)
        planned.append([(p.request_id, len(p.known)) for p in plan.requests] if plan else None)
        if plan is not None:
            assert plan.decodes == decodes
            scheduler.update(plan, answer(plan, random.Random(0)))
    assert planned == [[("a", 5), ("b", 3)], [("b", 4)], None, [("a", 1), ("b", 1)]]


def test_who_waits_joins_a_step_there_is_but_makes_none_unless_admitted() -> None:
    scheduler = make_scheduler(prefill_chunk=8)
    scheduler.add(make_request("a", prompt_length=10, max_tokens=4))
    planned = []
    for admits in (False, True, False, False, True):
        plan = scheduler.schedule(decodes=False, admits=admits)
        planned.append([(p.request_id, len(p.known)) for p in plan.requests] if plan else None)
        if plan is not None:
            scheduler.update(plan, answer(plan, random.Random(0)))
        if scheduler.num_waiting == 0 and len(planned) < 4:
            scheduler.add(make_request(f"b{len(planned)}", prompt_length=3, max_tokens=4))
    assert planned == [None, [("a", 8)], [("a", 2), ("b2", 3)], None, [("b3", 3)]]
    assert scheduler.num_admissible == 0


def test_only_those_with_a_slot_are_admissible() -> None:
    scheduler = make_scheduler(max_requests=2)
    for name in "abc":
        scheduler.add(make_request(name, prompt_length=3, max_tokens=4))
    assert (scheduler.num_waiting, scheduler.num_admissible) == (3, 2)
    scheduler.schedule()
    assert (scheduler.num_waiting, scheduler.num_admissible) == (1, 0)


def test_the_first_token_of_a_prefill_has_no_accept_length() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_length=3, max_tokens=4))
    plan = scheduler.schedule()
    assert plan is not None
    [output] = scheduler.update(plan, answer(plan, random.Random(0)))
    assert output.accept_length is None and len(output.token_ids) == 1


def test_an_end_token_inside_a_path_cuts_the_rest() -> None:
    scheduler = make_scheduler()
    request = make_request("a", prompt_length=3, max_tokens=20)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, answer(plan, random.Random(0)))
    plan = scheduler.schedule()
    assert plan is not None
    gained = RequestResult(request_id="a", tokens=(7, END, 8), num_drafted=6)
    [output] = scheduler.update(plan, StepResult(step=plan.step, requests=(gained,)))
    assert output.token_ids == (7, END) and output.accept_length == 2
    assert output.finish_reason == "stop"
    assert scheduler.num_running == 0


def test_end_tokens_wait_for_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_length=2, max_tokens=9, min_tokens=3))
    plan = scheduler.schedule()
    assert plan is not None
    gained = RequestResult(request_id="a", tokens=(END,), num_drafted=0)
    [output] = scheduler.update(plan, StepResult(step=plan.step, requests=(gained,)))
    assert output.finish_reason is None


def test_the_last_token_is_not_drafted_for() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_length=2, max_tokens=2))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, answer(plan, random.Random(0)))
    plan = scheduler.schedule()
    assert plan is not None and plan.requests[0].budget == 0


def test_drafts_never_reach_past_the_model() -> None:
    scheduler = make_scheduler(max_model_len=16)
    scheduler.add(make_request("a", prompt_length=4, max_tokens=12))
    while (plan := scheduler.schedule()) is not None:
        for planned in plan.requests:
            assert planned.budget == 0 or planned.root_position + DEPTH < 16
        scheduler.update(plan, answer(plan, random.Random(3)))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("a", 60, 10), "the most this engine takes is 64"),
        (Request("b", (1, 1000), SamplingParams(max_tokens=1), frozenset(), 0), "prompt: .* 999"),
        (make_request("c", 2, 1, logit_bias=((1000, 1.0),)), "logit_bias: .* 0 to 999"),
        (make_request("d", 2, 1, stop_token_ids=(-1,)), "stop_token_ids: .* 0 to 999"),
    ],
)
def test_what_can_never_run_is_refused_with_figures(request_: Request, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make_scheduler().validate(request_)


def test_more_pages_than_there_are_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="can grow to 14 KV pages of 4 tokens"):
        make_scheduler(num_pages=8).validate(make_request("a", 40, 8))


def test_abort_frees_waiting_and_running_requests() -> None:
    scheduler = make_scheduler(max_requests=1)
    scheduler.add(make_request("a", 3, 5))
    scheduler.add(make_request("b", 3, 5))
    scheduler.schedule()
    assert scheduler.abort("b") and scheduler.abort("a") and not scheduler.abort("a")
    assert scheduler.pages.num_used == 0
    assert scheduler.schedule() is None


def test_a_request_aborted_during_its_step_gains_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3, 5))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.abort("a")
    assert scheduler.update(plan, answer(plan, random.Random(0))) == []


def test_the_youngest_is_preempted_and_ends_the_same() -> None:
    scheduler = make_scheduler(num_pages=12, page_size=4, max_requests=3, budget=4)
    requests = [make_request(name, prompt_length=4, max_tokens=24) for name in "abc"]
    for request in requests:
        scheduler.validate(request)
        scheduler.add(request)
    run(scheduler, random.Random(1))
    assert scheduler.num_preemptions > 0
    assert requests[0].num_preemptions == 0
    for request in requests:
        assert request.tokens[4:] == [truth(p) for p in range(4, 28)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pages_are_conserved_under_random_submit_step_abort_preempt(data: st.DataObject) -> None:
    num_pages = data.draw(st.integers(8, 24))
    scheduler = make_scheduler(
        num_pages=num_pages,
        page_size=data.draw(st.sampled_from([1, 2, 4, 16])),
        max_requests=data.draw(st.integers(1, 4)),
        prefill_chunk=data.draw(st.integers(1, 9)),
        budget=data.draw(st.integers(0, 8)),
    )
    accept = random.Random(data.draw(st.integers(0, 999)))
    requests: dict[str, Request] = {}
    names = (f"r{n}" for n in count())
    for action in data.draw(st.lists(st.sampled_from(["submit", "step", "step", "abort"]))):
        if action == "submit":
            request = make_request(
                next(names), data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
            )
            try:
                scheduler.validate(request)
            except InvalidRequest:
                continue
            scheduler.add(request)
            requests[request.request_id] = request
        elif action == "abort" and requests:
            scheduler.abort(data.draw(st.sampled_from(sorted(requests))))
        elif (plan := scheduler.schedule()) is not None:
            check_plan(scheduler, plan)
            scheduler.update(plan, answer(plan, accept))
        scheduler.pages.check()
    run(scheduler, accept)
    assert scheduler.pages.num_free == num_pages
    for request in requests.values():
        start = len(request.prompt)
        expected = [truth(p) for p in range(start, start + request.sampling.max_tokens)]
        gained = request.tokens[start:]
        assert gained == expected[: len(gained)]
        assert request.finish_reason == "abort" or gained == expected
