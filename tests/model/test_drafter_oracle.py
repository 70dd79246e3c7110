"""The tests' own oracle drafter keeps its word."""

from __future__ import annotations

import numpy as np
import torch

from kdray.core.plan import Candidates, PlannedRequest, StepPlan
from kdray.core.request import SamplingParams
from kdray.core.tree import ABSENT
from tests.oracle_drafter import OracleDrafter

SEQUENCES = {"a": list(range(3, 90)), "b": list(range(90, 3, -1))}


def plan(position: int, budget: int = 4) -> StepPlan:
    requests = tuple(
        PlannedRequest(
            request_id=name,
            slot=slot,
            num_cached=position,
            known=np.array([sequence[position]], dtype=np.int32),
            budget=budget,
            pages=np.arange(32, dtype=np.int32),
            samples=True,
            sampling=SamplingParams(),
            seed=0,
            num_prompt=1,
        )
        for slot, (name, sequence) in enumerate(SEQUENCES.items())
    )
    return StepPlan(step=0, requests=requests)


def propose(accuracy: float, position: int = 10, seed: int = 0, budget: int = 4) -> Candidates:
    drafter = OracleDrafter(
        SEQUENCES, depth=5, candidates=4, vocab_size=100, accuracy=accuracy, seed=seed
    )
    step = plan(position, budget)
    roots = torch.tensor([int(r.known[-1]) for r in step.requests], dtype=torch.int32)
    return drafter.propose(step, roots)


def test_perfect_accuracy_puts_the_truth_first() -> None:
    candidates = propose(1.0)
    assert candidates.token[:, :, 0].tolist() == [[14, 15, 16, 17, 18], [79, 78, 77, 76, 75]]
    assert (candidates.score[:, :, 1:] <= candidates.score[:, :, :-1]).all()
    for row in candidates.token.flatten(0, 1).tolist():
        assert len(set(row)) == len(row)


def test_accuracy_is_kept_on_average_and_misses_are_elsewhere_or_absent() -> None:
    ranks: list[int | None] = []
    for position in range(10, 70):
        tokens = propose(0.6, position).token[0].tolist()
        truth = SEQUENCES["a"][position + 1 : position + 6]
        ranks += [row.index(t) if t in row else None for row, t in zip(tokens, truth, strict=True)]
    assert 0.5 < ranks.count(0) / len(ranks) < 0.7
    assert {0, 1, 2, 3, None} == set(ranks)


def test_it_is_a_function_of_seed_request_and_position() -> None:
    first, same, later = propose(0.5), propose(0.5), propose(0.5, position=11)
    assert torch.equal(first.token, same.token)
    assert torch.equal(first.token[:, 1:], later.token[:, :-1])
    assert not torch.equal(first.token, propose(0.5, seed=1).token)


def test_nothing_is_drafted_without_budget_or_behind_the_end() -> None:
    assert (propose(1.0, budget=0).score == ABSENT).all()
    behind = propose(1.0, position=84).score
    assert (behind[:, 2:] == ABSENT).all() and (behind[:, :2] != ABSENT).all()
