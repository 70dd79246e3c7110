"""Passes over planned steps against the forward pass launched for just these rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdray.config import EngineConfig
from kdray.core.plan import PlannedRequest, StepPlan
from kdray.engine import resolve
from kdray.engine_rounds import step_passes
from kdray.model.target import TargetModel
from kdray.verifier.layout import lay_out
from kdray.verifier.step_passes import StepPasses
from tests.verifier.step_plans import PAGE_SIZE, check_steps, planned, trees_of, verifiers

CPU = torch.device("cpu")


def test_a_pass_says_writes_and_taps_what_launches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    passing, launching = verifiers(CPU)
    rows: list[int] = []
    forward = TargetModel.forward

    def counted(self: TargetModel, batch, caches):  # type: ignore[no-untyped-def]
        rows.append(len(batch.token))
        return forward(self, batch, caches)

    monkeypatch.setattr(TargetModel, "forward", counted)
    check_steps(passing, launching, exact=True)
    assert rows[::2] == 2 * [32, 256, 32, 300, 128, 32]
    assert rows[1::2] == 2 * [17, 206, 14, 295, 124, 32]


def size_for(passes: StepPasses, *parts: PlannedRequest) -> int | None:
    plan = StepPlan(step=0, requests=parts)
    return passes.size_for(lay_out(plan, trees_of(plan, CPU), PAGE_SIZE, CPU))


def test_a_step_takes_the_least_pass_that_holds_its_rows() -> None:
    passes = verifiers(CPU)[0].passes
    assert passes is not None
    parts = tuple(planned(slot, 0, 80) for slot in range(4))
    assert size_for(passes, parts[0]) == 128
    assert size_for(passes, *parts[:3]) == 256
    assert size_for(passes, *parts) is None, "of 300 rows"
    assert size_for(passes, planned(0, 0, 28), planned(1, 8, 1, budget=3)) == 32
    assert size_for(passes, planned(0, 0, 28), planned(1, 8, 1, budget=4)) == 64
    short = planned(0, 0, 3)
    crowd = tuple(replace(short, slot=slot) for slot in range(5))
    assert size_for(passes, *crowd[:4]) == 32
    assert size_for(passes, *crowd) is None, "of 4 requests"


def test_passes_in_bfloat16() -> None:
    check_steps(*verifiers(CPU, dtype="bfloat16"), exact=False)


def test_rows_that_attentions_kernel_does_not_take_have_no_passes() -> None:
    config = EngineConfig(device="cpu")
    facts = resolve(config)
    model = replace(facts.model, kv_lora_rank=48)
    on_gpu = replace(facts, device=torch.device("cuda"), model=model)
    assert step_passes(config, on_gpu, None, None, None) is None  # type: ignore[arg-type]
