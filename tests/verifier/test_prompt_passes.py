"""Passes over prompts against the forward pass launched for just these rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdray.config import EngineConfig
from kdray.core.plan import StepPlan
from kdray.engine import resolve
from kdray.engine_rounds import prompt_passes
from kdray.model.target import TargetModel
from kdray.verifier.prompt_passes import PromptPasses
from tests.verifier.prompt_plans import check_steps, planned, verifiers

CPU = torch.device("cpu")


def passes_of() -> PromptPasses:
    found = verifiers(CPU)[0].prompts
    assert found is not None
    return found


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
    assert rows[1::2] == 2 * [17, 200, 7, 295, 124, 32]


def test_steps_that_draft_are_no_passes() -> None:
    passes = passes_of()
    drafting = StepPlan(step=0, requests=(planned(0, 0, 20), planned(1, 8, 1, budget=4)))
    assert passes.size_for(drafting) is None
    alone = StepPlan(step=0, requests=drafting.requests[:1])
    assert passes.size_for(alone) == 32


def test_more_rows_than_any_pass_has_are_launched() -> None:
    passes = passes_of()
    parts = tuple(planned(slot, 0, 80) for slot in range(4))
    assert passes.size_for(StepPlan(step=0, requests=parts)) is None
    assert passes.size_for(StepPlan(step=0, requests=parts[:3])) == 256
    crowd = tuple(replace(parts[0], slot=slot) for slot in range(5))
    assert passes.size_for(StepPlan(step=0, requests=crowd)) is None, "of 4 slots"


def test_passes_in_bfloat16() -> None:
    check_steps(*verifiers(CPU, dtype="bfloat16"), exact=False)


def test_rows_that_attentions_kernel_does_not_take_have_no_passes() -> None:
    config = EngineConfig(device="cpu")
    facts = resolve(config)
    model = replace(facts.model, kv_lora_rank=48)
    on_gpu = replace(facts, device=torch.device("cuda"), model=model)
    assert prompt_passes(config, on_gpu, None, None, None) is None  # type: ignore[arg-type]
