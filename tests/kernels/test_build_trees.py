from __future__ import annotations

import numpy as np
import pytest
import torch

from kdray.core.plan import Candidates, DraftTrees
from kdray.core.tree import ABSENT, ancestor_mask, build_tree, mask_to_bool, quantise
from kdray.kernels.ops import Ops


def candidates(requests: int, depth: int, width: int, *, grid: float) -> Candidates:
    """Random sorted rows on a coarse grid, with token 0, duplicates and absent ends."""
    rng = np.random.default_rng(1)
    logprob = -np.sort(np.round(rng.exponential(2.0, (requests, depth, width)) / grid) * grid)
    logprob[rng.random(logprob.shape) < 0.1] = -np.inf
    score = -np.sort(-quantise(logprob).astype(np.int64)).astype(np.int32)
    token = rng.integers(0, 5, score.shape).astype(np.int32)
    return Candidates(token=torch.from_numpy(token), score=torch.from_numpy(score))


@pytest.mark.parametrize("grid", [0.5, 1e-6], ids=["ties", "no ties"])
@pytest.mark.parametrize("budgets", [[0], [1], [31], [32], [33], [0, 7, 64, 3], [200, 5]], ids=str)
def test_every_tree_equals_the_one_of_core(ops: Ops, budgets: list[int], grid: float) -> None:
    given = candidates(len(budgets), 7, 16, grid=grid)
    roots = torch.arange(100, 100 + len(budgets), dtype=torch.int32)
    trees = ops.build_trees(given, roots, budgets)
    num_nodes = 1 + max(budgets)
    assert trees.mask.shape == (len(budgets), num_nodes, -(-num_nodes // 32))
    for column in (trees.token, trees.parent, trees.depth, trees.score):
        assert column.shape == (len(budgets), num_nodes) and column.dtype == torch.int32
    for r, budget in enumerate(budgets):
        tree = build_tree(100 + r, given.token[r].numpy(), given.score[r].numpy(), budget)
        own = slice(0, tree.num_nodes)
        assert trees.num_nodes[r] == tree.num_nodes
        for name in ("token", "parent", "depth", "score"):
            assert np.array_equal(getattr(trees, name)[r, own].numpy(), getattr(tree, name))
        mask = mask_to_bool(trees.mask[r, own].numpy(), num_nodes)
        expected = mask_to_bool(ancestor_mask(tree.parent), tree.num_nodes)
        assert np.array_equal(mask[:, own], expected) and not mask[:, tree.num_nodes :].any()


def test_padding_nodes_see_themselves_alone_and_are_absent(ops: Ops) -> None:
    trees = ops.build_trees(
        candidates(2, 3, 4, grid=0.5), torch.zeros(2, dtype=torch.int32), [0, 40]
    )
    mask = mask_to_bool(trees.mask[0].numpy(), 41)
    assert np.array_equal(mask, np.eye(41, dtype=bool))
    assert (trees.score[0, 1:] == ABSENT).all() and (trees.parent[0, 1:] == -1).all()


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0)], ids=str)
def test_without_candidates_only_roots_are_left(ops: Ops, shape: tuple[int, int]) -> None:
    empty = torch.zeros(2, *shape, dtype=torch.int32)
    roots = torch.tensor([4, 0], dtype=torch.int32)
    trees: DraftTrees = ops.build_trees(Candidates(token=empty, score=empty), roots, [3, 0])
    assert trees.num_nodes.tolist() == [1, 1]
    assert trees.token[:, 0].tolist() == [4, 0]
