"""accept_path.cu against ReferenceOps, on sound and on broken trees."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from kdray.core.plan import DraftTrees
from kdray.kernels.cuda_accept import Acceptance, accept_paths
from kdray.kernels.loader import KernelLoader
from kdray.kernels.reference import ReferenceOps
from tests.kernels.random_trees import break_trees, is_broken, random_trees, walking_target

pytestmark = pytest.mark.gpu
SIZES = [1, 2, 8, 31, 32, 33, 34, 64, 65, 66, 257, 1024, 1025]


def to(trees: DraftTrees, device: torch.device) -> DraftTrees:
    return DraftTrees(**{f.name: getattr(trees, f.name).to(device) for f in fields(trees)})


def accept(loader: KernelLoader, trees: DraftTrees, target: torch.Tensor, depth: int) -> Acceptance:
    return accept_paths(loader, to(trees, loader.device), target.to(loader.device), depth)


def assert_equals_reference(
    got: Acceptance, trees: DraftTrees, target: torch.Tensor, depth: int
) -> None:
    expected = ReferenceOps(torch.device("cpu")).accept_paths(trees, target, depth)
    assert torch.equal(got.paths.length.cpu(), expected.length)
    assert torch.equal(got.paths.node.cpu(), expected.node)
    assert torch.equal(got.paths.bonus.cpu(), expected.bonus)
    assert np.array_equal(got.malformed.cpu().numpy(), is_broken(trees).astype(np.int32))


@pytest.mark.parametrize("depth", [0, 1, 7, 15, 40])
@pytest.mark.parametrize("nodes", SIZES)
def test_paths_equal_the_reference(loader: KernelLoader, nodes: int, depth: int) -> None:
    rng = np.random.default_rng(nodes * 100 + depth)
    longest = 0
    for bushy in (0.0, 0.3, 1.0):
        trees = random_trees(rng, 40, nodes, bushy=bushy)
        target = walking_target(rng, trees, far=0.95)
        got = accept(loader, trees, target, depth)
        assert_equals_reference(got, trees, target, depth)
        longest = max(longest, int(got.paths.length.max()))
    assert longest == 1 + min(depth, nodes - 1) or nodes > 16


def test_ten_thousand_broken_trees_neither_hang_nor_crash(loader: KernelLoader) -> None:
    rng = np.random.default_rng(5)
    seen = 0
    for nodes in (1, 5, 17, 33, 100):
        trees = break_trees(rng, random_trees(rng, 4000, nodes, bushy=0.5))
        target = walking_target(rng, trees_within(trees), far=0.9)
        assert_equals_reference(accept(loader, trees, target, 15), trees, target, 15)
        seen += int(is_broken(trees).sum())
    assert seen >= 10_000


def trees_within(trees: DraftTrees) -> DraftTrees:
    """The same with parents clipped into the arrays, so that a target can be aimed at them."""
    clipped = trees.parent.clamp(-1, trees.parent.shape[1] - 1)
    return DraftTrees(
        **{f.name: getattr(trees, f.name) for f in fields(trees) if f.name != "parent"},
        parent=clipped,
    )


def test_of_siblings_with_one_token_the_first_is_taken(loader: KernelLoader) -> None:
    rng = np.random.default_rng(6)
    trees = random_trees(rng, 200, 1025, bushy=1.0)
    same = DraftTrees(
        token=torch.zeros_like(trees.token),
        parent=torch.where(trees.parent > 0, trees.parent % 3, trees.parent),
        depth=trees.depth,
        score=trees.score,
        mask=trees.mask,
        num_nodes=trees.num_nodes,
    )
    target = torch.zeros_like(trees.token)
    assert_equals_reference(accept(loader, same, target, 15), same, target, 15)


def test_no_request_is_no_work(loader: KernelLoader) -> None:
    trees = random_trees(np.random.default_rng(0), 0, 9, bushy=1.0)
    got = accept(loader, trees, torch.zeros(0, 9, dtype=torch.int32), 3)
    assert got.paths.node.shape == (0, 4) and got.malformed.shape == (0,)


def test_every_output_is_written(loader: KernelLoader) -> None:
    rng = np.random.default_rng(9)
    trees = random_trees(rng, 64, 33, bushy=0.4)
    target = walking_target(rng, trees, far=0.8)
    first = accept(loader, trees, target, 15)
    torch.cuda.synchronize()
    # The allocator hands the same memory out again, now full of this pattern.
    outputs = (first.paths.node, first.paths.length, first.paths.bonus, first.malformed)
    kept = [output.cpu() for output in outputs]
    for output in outputs:
        output.fill_(-559038737)
    del first, outputs
    again = accept(loader, trees, target, 15)
    found = (again.paths.node, again.paths.length, again.paths.bonus, again.malformed)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(kept, found, strict=True))


def test_too_large_a_tree_is_refused(loader: KernelLoader) -> None:
    trees = random_trees(np.random.default_rng(0), 1, 1026, bushy=1.0)
    with pytest.raises(ValueError, match="1 to 1025 nodes, not 1026"):
        accept(loader, trees, trees.token, 3)
