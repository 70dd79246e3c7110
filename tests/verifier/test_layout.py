"""The rows of a step: without drafts they are laid out and committed without asking the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdray.core.plan import AcceptedPaths, Candidates, DraftTrees, PlannedRequest, StepPlan
from kdray.core.request import SamplingParams
from kdray.kernels.ops import load_ops
from kdray.verifier.layout import HostTrees, lay_out
from kdray.verifier.verifier import Verifier

CPU, UNREADABLE = torch.device("cpu"), torch.device("meta")


def planned(name: str, cached: int, known: list[int], *, samples: bool = True) -> PlannedRequest:
    return PlannedRequest(
        request_id=name,
        slot=0,
        num_cached=cached,
        known=np.array(known, dtype=np.int32),
        budget=0,
        pages=np.arange(4, dtype=np.int32),
        samples=samples,
        sampling=SamplingParams(),
        seed=0,
        num_prompt=cached + len(known),
    )


@pytest.fixture
def prompts() -> StepPlan:
    a, b = planned("a", 0, [7, 8, 9], samples=False), planned("b", 4, [5])
    return StepPlan(step=1, requests=(a, b, planned("c", 2, [3, 4])))


@pytest.fixture
def trees(prompts: StepPlan) -> DraftTrees:
    """As a round builds them."""
    roots = torch.tensor([r.known[-1] for r in prompts.requests], dtype=torch.int32)
    none = torch.zeros(len(roots), 0, 0, dtype=torch.int32)
    return load_ops(CPU).build_trees(Candidates(token=none, score=none), roots, [0] * len(roots))


def test_roots_are_the_trees_of_a_plan_without_drafts(prompts: StepPlan, trees: DraftTrees) -> None:
    known, read = HostTrees.of_roots(prompts), HostTrees.of(trees)
    assert known.num_nodes == read.num_nodes
    for name in ("token", "parent", "depth"):
        np.testing.assert_array_equal(getattr(known, name), getattr(read, name))
        assert getattr(known, name).dtype == getattr(read, name).dtype


def test_prompts_are_laid_out_without_reading_the_trees(prompts: StepPlan) -> None:
    layout = lay_out(prompts, unread_trees(prompts), page_size=16, device=CPU)
    assert layout.batch.token.tolist() == [7, 8, 9, 5, 3, 4]
    assert layout.batch.position.tolist() == [0, 1, 2, 4, 2, 3]
    assert layout.drawn_rows.tolist() == [3, 5]
    assert [index.tolist() for index in layout.drawn_at] == [[1, 2], [0, 0]]


def test_a_commit_without_drafts_does_not_read_the_paths(prompts: StepPlan) -> None:
    verifier = Verifier.__new__(Verifier)
    verifier._layout = lay_out(prompts, unread_trees(prompts), page_size=16, device=CPU)
    path = torch.zeros(3, 1, dtype=torch.int32, device=UNREADABLE)
    verifier.commit(AcceptedPaths(node=path, length=path[:, 0], bonus=path[:, 0]))
    with pytest.raises(AssertionError, match="commit follows verify"):
        verifier.commit(AcceptedPaths(node=path, length=path[:, 0], bonus=path[:, 0]))


def unread_trees(plan: StepPlan) -> DraftTrees:
    column = torch.zeros(len(plan.requests), 1, dtype=torch.int32, device=UNREADABLE)
    return DraftTrees(
        token=column, parent=column, depth=column, score=column, mask=column[..., None],
        num_nodes=column[:, 0],
    )  # fmt: skip
