"""Device rounds that run ahead of the host: the same tokens as steps from the host, one by one.

Here they run uncaptured on the CPU, in the order of steps, pages and late results of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import islice

import pytest

from jobs.closed_loop import ModelledClock
from jobs.traffic import Reply, Visit, demo_prompts, draw_visits, run_visits
from kdray.config import EngineConfig
from kdray.core.plan import RequestResult
from kdray.core.request import SamplingParams
from kdray.driver.ahead import InFlight
from kdray.driver.turns import PromptTurns
from kdray.engine import Engine, build_engine, make_request, resolve
from kdray.errors import InvalidRequest

LENGTH = 320


def engine_of(*, ahead: bool, **wishes: object) -> Engine:
    wishes = {"max_requests": 5, "max_model_len": LENGTH, **wishes}
    config = EngineConfig(device="cpu", **wishes)  # type: ignore[arg-type]
    return build_engine(config, resolve(config), runs_ahead=ahead)


@cache
def visits_of(seed: int, count: int) -> tuple[Visit, ...]:
    prompts = demo_prompts(resolve(EngineConfig(device="cpu")), each=3)
    fitting = [prompt for prompt in prompts if len(prompt) < LENGTH - 50]
    return tuple(islice(draw_visits(fitting, seed=seed, most_tokens=40), count))


@cache
def plainly(seed: int, count: int) -> tuple[Reply, ...]:
    engine = engine_of(ahead=False, mode="plain")
    return tuple(run_visits(engine.driver, engine.facts, visits_of(seed, count)))


def check_same(
    replies: list[Reply], expected: tuple[Reply, ...], visits: tuple[Visit, ...]
) -> None:
    for reply, other, visit in zip(replies, expected, visits, strict=True):
        if visit.patience is None:
            assert reply == other
        else:  # who leaves has got so far as its steps went
            shared = min(len(reply.token_ids), len(other.token_ids))
            assert reply.token_ids[:shared] == other.token_ids[:shared]


@pytest.mark.parametrize("wishes", [
    {"budget": 16}, {"budget": 5, "page_size": 1}, {"mode": "chain", "budget": 7},
    {"mode": "plain"}, {"budget": 16, "max_requests": 1}, {"budget": 8, "prefill_chunk": 7},
], ids=str)  # fmt: skip
def test_rounds_ahead_of_the_host_write_what_plain_decoding_writes(
    wishes: dict[str, object],
) -> None:
    seed, count = 11, 24
    engine = engine_of(ahead=True, **wishes)
    replies = run_visits(engine.driver, engine.facts, visits_of(seed, count))
    check_same(replies, plainly(seed, count), visits_of(seed, count))
    assert engine.driver.scheduler.pages.num_used == 0
    assert engine.driver.clock.seconds["launch"] > 0


def gathering(engine: Engine) -> Engine:
    """With steps of prompts that cost nine rounds."""
    clock = ModelledClock(engine.driver, round_s=1.0, host_step_s=9.0)
    engine.driver.prompt_turns = PromptTurns(clock.now)
    return engine


def test_prompts_that_gather_change_no_token() -> None:
    """Among visits that come, and leave before their turn or after it."""
    seed, count = 12, 30
    engine = gathering(engine_of(ahead=True))
    replies = run_visits(engine.driver, engine.facts, visits_of(seed, count))
    check_same(replies, plainly(seed, count), visits_of(seed, count))
    assert engine.driver.scheduler.pages.num_used == 0
    assert engine.driver.counters.prompt_steps < count


def test_what_ran_in_front_of_a_step_from_the_host_is_out_with_it() -> None:
    """So nobody whom that round ended runs once more, and his slot is free at once."""
    engine = engine_of(ahead=True)
    driver = engine.driver
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    driver.submit(make_request("first", range(100, 120), sampling, engine.facts))
    driver.step()
    driver.step()
    assert len(driver._flights) == 1
    driver.prompt_turns.is_due = lambda **_: True  # type: ignore[method-assign]
    driver.submit(make_request("second", range(100, 130), sampling, engine.facts))
    outputs = driver.step()
    assert [output.request_id for output in outputs or ()] == ["second", "first", "first"]
    assert not driver._flights


def staying(prompt: Sequence[int], sampling: SamplingParams) -> Visit:
    return Visit(prompt=tuple(prompt), sampling=sampling, pause=0, patience=None)


@pytest.mark.parametrize("gathers", [False, True])
def test_short_of_pages_the_step_in_flight_is_read_before_anyone_is_preempted(
    gathers: bool,
) -> None:
    sampling = SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.8, seed=4)
    visits = [staying(range(100 * n, 100 * n + 20), sampling) for n in range(1, 8)]
    engine = engine_of(ahead=True, budget=8, page_size=1, num_pages=200)
    if gathers:
        gathering(engine)
    replies = run_visits(engine.driver, engine.facts, visits)
    assert engine.driver.scheduler.num_preemptions > 0
    plain = engine_of(ahead=False, mode="plain")
    assert replies == run_visits(plain.driver, plain.facts, visits)


def test_who_runs_ahead_does_not_wait_for_whose_draws_need_the_host() -> None:
    """They end while the others' turn does not come, and the others then, with the same tokens."""
    penalised = SamplingParams(max_tokens=12, ignore_eos=True, presence_penalty=0.4)
    free = SamplingParams(max_tokens=40, ignore_eos=True)
    visits = [staying(range(100, 120), penalised), staying(range(200, 230), free)]
    engine, plain = engine_of(ahead=True), engine_of(ahead=False, mode="plain")
    driver = engine.driver
    driver.host_turns.is_due = lambda: False  # type: ignore[method-assign]
    requests = [
        make_request(f"r{n}", visit.prompt, visit.sampling, engine.facts)
        for n, visit in enumerate(visits)
    ]
    for request in requests:
        driver.submit(request)
    ended = [output for outputs in iter(driver.step, None) for output in outputs]
    assert [output.request_id for output in ended if output.finish_reason] == ["r1", "r0"]
    wanted = [reply.token_ids for reply in run_visits(plain.driver, plain.facts, visits)]
    assert [request.tokens[len(request.prompt) :] for request in requests] == wanted


def test_a_text_that_fills_the_model_ends_there() -> None:
    visit = staying((1920, *range(100, 129)), SamplingParams(max_tokens=34, ignore_eos=True))
    replies = []
    for ahead in (False, True):
        engine = engine_of(ahead=ahead, budget=16, max_model_len=64)
        replies += run_visits(engine.driver, engine.facts, [visit])
    assert replies[0] == replies[1]
    assert len(replies[0].token_ids) == 34 and replies[0].finish_reason == "length"


def test_broken_weights_are_said() -> None:
    engine = engine_of(ahead=True)
    visit = staying(range(100, 140), SamplingParams(max_tokens=8, ignore_eos=True))
    run_visits(engine.driver, engine.facts, [visit])
    driver = engine.driver
    driver.submit(make_request("late", visit.prompt, visit.sampling, engine.facts))
    driver.step()  # the prompt, with sound weights
    model = driver.verifiers._verifier.model  # type: ignore[attr-defined]
    model.final_norm.weight.fill_(float("nan"))
    ended = [output for outputs in iter(driver.step, None) for output in outputs]
    assert [output.request_id for output in ended if output.finish_reason == "error"] == ["late"]
    assert "late: no finite logit" in str(ended[-1].error)
    assert driver.scheduler.pages.num_used == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_as_long_as_the_model_finds_its_pages(ahead: bool) -> None:
    engine = engine_of(ahead=ahead, max_requests=1, budget=16)
    visit = staying(range(100, 120), SamplingParams(max_tokens=LENGTH - 20, ignore_eos=True))
    [reply] = run_visits(engine.driver, engine.facts, [visit])
    assert len(reply.token_ids) == LENGTH - 20


def test_a_step_that_is_interrupted_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = [staying(range(100, 120), SamplingParams(max_tokens=40, ignore_eos=True))]
    [expected] = run_visits(engine_of(ahead=True).driver, engine_of(ahead=True).facts, visits)
    engine = engine_of(ahead=True)
    driver, decoder = engine.driver, engine.driver._decoder
    assert decoder is not None
    request = make_request("r", visits[0].prompt, visits[0].sampling, engine.facts)
    driver.submit(request)
    collect, calls = decoder.collect, 0

    def interrupted(flight: InFlight) -> list[RequestResult]:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyboardInterrupt
        return collect(flight)

    monkeypatch.setattr(decoder, "collect", interrupted)
    while request.finish_reason is None:
        with suppress(KeyboardInterrupt):
            driver.step()
    assert calls > 6
    assert request.tokens[20:] == expected.token_ids


def test_broken_logits_of_a_request_that_left_trouble_nobody() -> None:
    engine = engine_of(ahead=True)
    driver, sampling = engine.driver, SamplingParams(max_tokens=30, ignore_eos=True)
    driver.submit(make_request("left", range(100, 120), sampling, engine.facts))
    driver.step()
    model = driver.verifiers._verifier.model  # type: ignore[attr-defined]
    weight = model.final_norm.weight.clone()
    model.final_norm.weight.fill_(float("nan"))
    driver.step()
    model.final_norm.weight.copy_(weight)
    driver.abort("left")
    visit = staying(range(100, 120), sampling)
    [reply] = run_visits(driver, engine.facts, [visit])
    assert len(reply.token_ids) == 30


def test_prompt_tokens_are_counted_alike() -> None:
    counted = []
    for ahead in (False, True):
        engine = engine_of(ahead=ahead, prefill_chunk=7)
        visits = [staying(range(100, 100 + n), SamplingParams(max_tokens=3)) for n in (1, 8, 20)]
        run_visits(engine.driver, engine.facts, visits)
        counted.append(engine.driver.counters.prompt_tokens)
    assert counted == [29, 29]


def test_an_id_is_refused_while_its_request_is_open() -> None:
    engine = engine_of(ahead=True)
    sampling = SamplingParams(max_tokens=3)
    first, second = (make_request("same", [5, 6], sampling, engine.facts) for _ in range(2))
    engine.driver.submit(first)
    with pytest.raises(InvalidRequest, match="still open"):
        engine.driver.submit(second)
    while engine.driver.step() is not None:
        pass
    engine.driver.submit(second)
