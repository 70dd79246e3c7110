"""Passes over prompts against the forward pass launched for just these rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdray.core.plan import StepPlan
from kdray.model.target import TargetModel
from kdray.verifier.prompt_passes import PromptPasses
from tests.verifier.prompt_plans import planned, roots_of, slots_of, steps, verifiers

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
    done: list[StepPlan] = []
    for plan in steps():
        done.append(plan)
        mine, other = (v.verify(plan, roots_of(plan, CPU)) for v in (passing, launching))
        assert torch.equal(mine.token, other.token) and mine.broken == other.broken == frozenset()
        torch.testing.assert_close(mine.features, other.features, rtol=1e-4, atol=1e-4)
        written = slots_of(done)
        for cache, wanted in zip(passing.cache.layers, launching.cache.layers, strict=True):
            torch.testing.assert_close(cache[written], wanted[written], rtol=1e-4, atol=1e-4)
            others = torch.ones(len(cache), dtype=torch.bool)
            others[written] = False
            others[-passing.cache.page_size :] = False  # the spare page takes the padding
            assert not cache[others].any(), "what no request has run stays as it was"
    assert rows[::2] == [32, 256, 32, 300, 128, 32] and rows[1::2] == [17, 200, 7, 295, 124, 32]


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
