from __future__ import annotations

import numpy as np
import pytest
import torch

from kdray.core.plan import Candidates, DraftTrees
from kdray.core.tree import DraftTree, follow, quantise, sort_candidates
from kdray.kernels.ops import Ops


def some_trees(ops: Ops, budgets: list[int]) -> DraftTrees:
    rng = np.random.default_rng(3)
    shape = (len(budgets), 4, 3)
    rows = sort_candidates(rng.integers(0, 3, shape), quantise(-rng.exponential(1.0, shape)))
    token, score = map(torch.from_numpy, rows)
    roots = torch.zeros(len(budgets), dtype=torch.int32)
    return ops.build_trees(Candidates(token=token, score=score), roots, budgets)


def host_tree(trees: DraftTrees, r: int) -> DraftTree:
    own = slice(0, int(trees.num_nodes[r]))
    columns = (trees.token, trees.parent, trees.depth, trees.score)
    return DraftTree(*(column[r, own].numpy() for column in columns))


def replaced(trees: DraftTrees, **changes: torch.Tensor) -> DraftTrees:
    columns = ("token", "parent", "depth", "score", "mask", "num_nodes")
    return DraftTrees(**({name: getattr(trees, name) for name in columns} | changes))


@pytest.mark.parametrize("budgets", [[0], [5], [0, 30, 3, 12]], ids=str)
def test_paths_equal_those_of_core(ops: Ops, budgets: list[int]) -> None:
    trees = some_trees(ops, budgets)
    lengths = []
    for _ in range(20):
        target = torch.randint(0, 3, trees.token.shape, dtype=torch.int32)
        paths = ops.accept_paths(trees, target, depth=4)
        assert paths.node.shape == (len(budgets), 5)
        assert paths.node.dtype == paths.length.dtype == paths.bonus.dtype == torch.int32
        for r in range(len(budgets)):
            tree = host_tree(trees, r)
            path = follow(tree, target[r, : tree.num_nodes].numpy())
            length = int(paths.length[r])
            assert tuple(paths.node[r, :length].tolist()) == path.node
            assert length == path.accept_length and paths.bonus[r] == path.bonus
            lengths.append(length)
    assert max(lengths) > 1 or max(budgets) == 0


def test_padding_behind_a_tree_is_never_accepted(ops: Ops) -> None:
    trees = some_trees(ops, [0, 12])
    looks_like_a_child = replaced(trees, parent=torch.where(trees.parent < 0, 0, trees.parent))
    looks_like_a_child.parent[:, 0] = -1
    target = torch.zeros_like(trees.token)  # padding bears token 0
    assert ops.accept_paths(looks_like_a_child, target, depth=4).length[0] == 1


def test_a_path_is_cut_at_the_depth_and_stays_lossless(ops: Ops) -> None:
    chain = torch.arange(-1, 3, dtype=torch.int32)[None]
    token = torch.tensor([[9, 1, 2, 3]], dtype=torch.int32)
    counts = torch.tensor([4], dtype=torch.int32)
    trees = DraftTrees(
        token=token, parent=chain, depth=chain + 1, score=chain, mask=chain, num_nodes=counts
    )
    paths = ops.accept_paths(trees, torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), depth=2)
    assert paths.node.tolist() == [[0, 1, 2]] and paths.bonus.tolist() == [3]


@pytest.mark.parametrize(
    "parent",
    [[0, 0, 1], [-1, 1, 1], [-1, 2, 1], [-1, 0, 7], [-1, -5, 0], [-1, -1, 0]],
    ids=str,
)
def test_a_malformed_tree_yields_its_root_alone(ops: Ops, parent: list[int]) -> None:
    column = torch.zeros(2, 3, dtype=torch.int32)
    trees = DraftTrees(
        token=column,
        parent=torch.tensor([parent, [-1, 0, 1]], dtype=torch.int32),
        depth=column,
        score=column,
        mask=column[:, :, None],
        num_nodes=torch.tensor([3, 3], dtype=torch.int32),
    )
    target = torch.tensor([[0, 0, 0], [0, 0, 6]], dtype=torch.int32)
    paths = ops.accept_paths(trees, target, depth=2)
    assert paths.length.tolist() == [1, 3]
    assert paths.node[0, 0] == 0 and paths.bonus.tolist() == [0, 6]


@pytest.mark.parametrize("count", [-1, 0, 4])
def test_an_impossible_node_count_yields_the_root_alone(ops: Ops, count: int) -> None:
    trees = some_trees(ops, [2])
    broken = replaced(trees, num_nodes=torch.tensor([count], dtype=torch.int32))
    target = trees.token[:, [1, 2, 0]]
    paths = ops.accept_paths(broken, target, depth=4)
    assert paths.length.tolist() == [1] and paths.bonus.tolist() == target[:, 0].tolist()
