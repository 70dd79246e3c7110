"""Captured rounds on a GPU: the tokens of steps from the host, and of plain decoding."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from jobs.traffic import Reply, Visit, demo_prompts, draw_visits, run_visits
from kdray.config import EngineConfig
from kdray.core.plan import StepPlan, StepResult
from kdray.core.request import SamplingParams
from kdray.engine import build_engine, make_request, resolve
from kdray.kernels.cuda_round import CudaRoundOps
from kdray.verifier.layout import StepLayout
from kdray.verifier.verifier import Verifier
from tests.gpu.near_ties import check_same
from tests.kernels.round_cases import check_round

pytestmark = pytest.mark.gpu

COUNT = 120


@pytest.fixture(scope="module")
def visits(device: torch.device) -> list[Visit]:
    prompts = demo_prompts(resolve(EngineConfig(device="cuda")))
    return list(islice(draw_visits(prompts, seed=7, most_tokens=64), COUNT))


@pytest.fixture(scope="module")
def plainly(visits: list[Visit]) -> list[Reply]:
    return replies_of(visits, mode="plain", graphs=False)


def replies_of(visits: list[Visit], **wishes: object) -> list[Reply]:
    config = EngineConfig(device="cuda", dtype="float32", **wishes)  # type: ignore[arg-type]
    engine = build_engine(config, resolve(config))
    replies = run_visits(engine.driver, engine.facts, visits)
    assert engine.driver.scheduler.pages.num_used == 0
    return replies


@pytest.mark.parametrize("wishes", [
    {"budget": 16}, {"budget": 31, "max_requests": 5}, {"mode": "chain", "budget": 7},
    {"mode": "plain"}, {"budget": 16, "page_size": 1, "num_pages": 2100}, {"max_requests": 1},
    {"budget": 16, "graphs": False},
], ids=str)  # fmt: skip
def test_captured_rounds_write_what_plain_decoding_writes(
    visits: list[Visit], plainly: list[Reply], wishes: dict[str, object]
) -> None:
    replies = replies_of(visits, **wishes)
    for visit, mine, other in zip(visits, replies, plainly, strict=True):
        check_same(visit, mine, other)


def test_a_prompts_launches_do_not_wait_for_the_rounds_in_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the plan to the end of its forward pass the host waits for nothing."""
    config = EngineConfig(device="cuda", max_requests=6)
    engine = build_engine(config, resolve(config))
    driver, sampling = engine.driver, SamplingParams(max_tokens=60, ignore_eos=True)
    for n in range(2):  # the first of a kind may wait, for memory and kernels
        driver.submit(make_request(f"warm{n}", range(100, 400), sampling, engine.facts))
        driver.submit(make_request(f"short{n}", range(100, 120), sampling, engine.facts))
        driver.step()
    whole, forward, passes = driver.round, Verifier._forward, []

    def strict(plan: StepPlan) -> StepResult:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return whole(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def passed(self: Verifier, layout: StepLayout) -> object:
        output = forward(self, layout)
        torch.cuda.set_sync_debug_mode("default")
        passes.append(len(driver._flights))
        return output

    monkeypatch.setattr(driver.prompt_turns, "is_due", lambda **_: True)
    monkeypatch.setattr(driver, "round", strict)
    monkeypatch.setattr(Verifier, "_forward", passed)
    driver.submit(make_request("long", range(100, 400), sampling, engine.facts))
    driver.submit(make_request("short", range(100, 120), sampling, engine.facts))
    while driver.step() is not None:
        pass
    assert passes and min(passes) >= 1


@pytest.mark.parametrize("seed", range(20))
def test_the_rounds_ops_equal_the_reference(seed: int, device: torch.device) -> None:
    check_round(CudaRoundOps(device), seed, device)
