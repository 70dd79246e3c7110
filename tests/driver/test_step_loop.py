"""The step loop's promises: refusals at the door, one message a step, a failure that is told."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest
import torch

from kdray.core.plan import StepPlan, StepResult
from kdray.core.request import SamplingParams
from kdray.driver import step_loop
from kdray.driver.scheduler import RequestOutput
from kdray.driver.step_loop import StepLoop
from kdray.engine import Engine, make_request
from kdray.errors import EngineClosed, InvalidRequest, RankFailed
from tests.harness import build, model_config
from tests.model import tiny

WAIT_S = 60.0
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_plain(tmp_path_factory.mktemp("tiny"))


class Listener:
    """Collects what a loop says."""

    def __init__(
        self,
        folder: Path,
        *,
        break_at: int | None = None,
        error: Exception | None = None,
    ) -> None:
        self.messages: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
        self.ended = threading.Event()
        self.engine: Engine = build(model_config(folder, page_size=4, max_model_len=64))
        if break_at is not None:
            _break(self.engine, break_at, error or RuntimeError("a rank is gone"))
        self.loop = StepLoop(lambda: self.engine, self.messages.put, self.ended.set)
        self.loop.start()
        self.loop.ready.result(WAIT_S)

    def submit(self, name: str, sampling: SamplingParams = LONG) -> None:
        self.loop.submit(make_request(name, (5, 6, 7), sampling, self.engine.facts))


def _break(engine: Engine, step: int, error: Exception) -> None:
    """The engine's round fails from the given step on."""
    whole = engine.driver.round

    def round_(plan: StepPlan) -> StepResult:
        if plan.step >= step:
            raise error
        return whole(plan)

    engine.driver.round = round_  # type: ignore[method-assign]


def test_every_step_is_one_message_and_the_last_says_why(folder: Path) -> None:
    listener = Listener(folder)
    listener.submit("a")
    tokens: list[int] = []
    reason = None
    while reason is None:
        [output] = listener.messages.get(timeout=WAIT_S)
        tokens += output.token_ids
        reason = output.finish_reason
    assert len(tokens) == 40 and reason == "length"
    listener.loop.close(WAIT_S)
    assert listener.ended.is_set() and listener.loop.failure is None


def test_stats_are_those_between_steps(folder: Path) -> None:
    listener = Listener(folder)
    listener.submit("a")
    for _ in range(40):
        listener.messages.get(timeout=WAIT_S)
    listener.loop.close(WAIT_S)
    stats = listener.loop.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (3, 40, 40)
    assert stats.stage_seconds["verify"] > 0


def test_what_can_never_run_is_refused_to_the_caller(folder: Path) -> None:
    listener = Listener(folder)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        listener.submit("a", SamplingParams(max_tokens=62))
    listener.loop.close(WAIT_S)


def test_an_aborted_request_frees_its_pages(folder: Path) -> None:
    listener = Listener(folder)
    listener.submit("a", SamplingParams(max_tokens=61, ignore_eos=True))
    listener.messages.get(timeout=WAIT_S)
    listener.loop.abort("a")
    listener.loop.abort("never seen")
    listener.submit("b", SamplingParams(max_tokens=1, ignore_eos=True))
    last = listener.messages.get(timeout=WAIT_S)
    while last[0].request_id != "b":
        last = listener.messages.get(timeout=WAIT_S)
    listener.loop.close(WAIT_S)
    assert listener.loop.stats().pages_used == 0


def test_a_failing_step_ends_the_loop_and_later_requests_hear_of_it(folder: Path) -> None:
    listener = Listener(folder, break_at=3)
    listener.submit("a")
    assert listener.ended.wait(WAIT_S)
    assert isinstance(listener.loop.failure, RuntimeError)
    with pytest.raises(RankFailed, match="a rank is gone"):
        listener.submit("b")


def test_memory_that_runs_out_is_a_failure_like_any_other(folder: Path) -> None:
    listener = Listener(folder, break_at=2, error=torch.OutOfMemoryError("out of memory"))
    listener.submit("a")
    assert listener.ended.wait(WAIT_S)
    assert isinstance(listener.loop.failure, torch.OutOfMemoryError)
    assert listener.loop.pulse().in_step_s is None
    with pytest.raises(RankFailed, match="out of memory"):
        listener.submit("b")


def test_a_step_that_hangs_is_seen_from_outside(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "_IDLE_POLL_S", WAIT_S)  # an idle loop steps now and then
    listener = Listener(folder)
    entered, leave = threading.Event(), threading.Event()
    whole = listener.engine.driver.round

    def hanging(plan: StepPlan) -> StepResult:
        entered.set()
        assert leave.wait(WAIT_S)
        return whole(plan)

    listener.engine.driver.round = hanging  # type: ignore[method-assign]
    assert listener.loop.pulse().in_step_s is None
    listener.submit("a", SamplingParams(max_tokens=1, ignore_eos=True))
    assert entered.wait(WAIT_S)
    first, second = listener.loop.pulse(), listener.loop.pulse()
    assert first.in_step_s is not None and second.in_step_s is not None
    assert first.in_step_s <= second.in_step_s and not second.is_late
    leave.set()
    listener.messages.get(timeout=WAIT_S)
    listener.loop.close(WAIT_S)
    assert listener.loop.pulse().in_step_s is None


def test_a_closed_loop_takes_no_requests(folder: Path) -> None:
    listener = Listener(folder)
    listener.loop.close(WAIT_S)
    with pytest.raises(EngineClosed):
        listener.submit("a")


def test_a_build_that_fails_is_told_to_who_waits(folder: Path) -> None:
    def build_() -> Engine:
        raise OSError("no such weights")

    loop = StepLoop(build_, lambda outputs: None, lambda: None)
    loop.start()
    with pytest.raises(OSError, match="no such weights"):
        loop.ready.result(WAIT_S)
