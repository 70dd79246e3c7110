"""accept_path.cu and commit_kv.cu, emulated: their own source, on CPU threads in random order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kdray.core.plan import DraftTrees
from kdray.kernels.cuda_accept import accept_paths
from kdray.kernels.cuda_commit import (
    CacheTable,
    PathBlock,
    SlotState,
    advance_requests,
    commit_kv,
    commit_paths,
)
from kdray.kernels.reference import ReferenceOps
from tests.kernels.random_paths import random_paths
from tests.kernels.random_trees import break_trees, is_broken, random_trees, walking_target
from tests.kernels.simt_loader import simt_loader

CPU = torch.device("cpu")


def check_paths(trees: DraftTrees, target: Tensor, depth: int, seed: int) -> int:
    """Compares all outputs; returns the longest path."""
    got = accept_paths(simt_loader(seed), trees, target, depth)
    expected = ReferenceOps(CPU).accept_paths(trees, target, depth)
    assert torch.equal(got.paths.node, expected.node)
    assert torch.equal(got.paths.length, expected.length)
    assert torch.equal(got.paths.bonus, expected.bonus)
    assert got.malformed.tolist() == is_broken(trees).tolist()
    return int(expected.length.max())


@pytest.mark.parametrize("depth", [0, 1, 7, 40])
@pytest.mark.parametrize("nodes", [1, 2, 8, 33, 34, 70])
def test_paths_equal_the_reference(nodes: int, depth: int) -> None:
    rng = np.random.default_rng(nodes * 100 + depth)
    longest = 0
    for bushy in (0.0, 0.3, 1.0):
        trees = random_trees(rng, 8, nodes, bushy=bushy)
        target = walking_target(rng, trees, far=0.97)
        longest = max(longest, check_paths(trees, target, depth, seed=nodes))
    assert longest > 1 or depth == 0 or nodes == 1


def test_the_largest_tree() -> None:
    rng = np.random.default_rng(1)
    trees = random_trees(rng, 2, 1025, bushy=0.02)
    assert check_paths(trees, walking_target(rng, trees, far=0.99), 15, seed=2) > 4


def test_broken_trees_yield_their_root_alone() -> None:
    rng = np.random.default_rng(3)
    for nodes in (1, 5, 33):
        sound = random_trees(rng, 150, nodes, bushy=0.5)
        target = walking_target(rng, sound, far=0.9)
        broken = break_trees(rng, sound)
        assert is_broken(broken).sum() > 50
        check_paths(broken, target, 15, seed=nodes)


def caches_of(num_rows: int) -> list[Tensor]:
    """Rows of 16-byte vectors, of words only, and a base that is off by a word."""
    words = torch.randint(-(2**31), 2**31, (num_rows * 8 + 1,)).int()
    return [
        torch.randn(num_rows, 40).bfloat16(),
        torch.randn(num_rows, 3),
        torch.randn(num_rows, 2, 150),
        words[1:].view(num_rows, 8),
    ]


def check_moved(caches: list[Tensor], before: list[Tensor], rows: tuple[Tensor, Tensor]) -> None:
    ReferenceOps(CPU).commit_kv(before, *rows)
    for cache, expected in zip(caches, before, strict=True):
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("moves", [1, 2, 9, 70])
def test_all_rows_are_read_before_any_is_written(moves: int) -> None:
    """A cycle: every row that is read is written too."""
    generator = torch.Generator().manual_seed(moves)
    caches = caches_of(2 * moves)
    before = [cache.clone() for cache in caches]
    target = torch.randperm(2 * moves, generator=generator)[:moves]
    commit_kv(simt_loader(moves), CacheTable.of(caches), target.roll(1), target)
    check_moved(caches, before, (target.roll(1), target))


def test_rows_that_no_cache_has_are_left_out() -> None:
    caches = caches_of(9)
    before = [cache.clone() for cache in caches]
    source, target = torch.tensor([8, 9, -1, 3, 3, 2**40]), torch.tensor([0, 1, 2, 9, -5, 4])
    commit_kv(simt_loader(), CacheTable.of(caches), source, target)
    check_moved(caches, before, (torch.tensor([8]), torch.tensor([0])))


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("requests", "width", "nodes"), [(1, 2, 9), (5, 8, 9), (2, 65, 90)])
def test_accepted_nodes_become_contiguous(
    requests: int, width: int, nodes: int, page_size: int
) -> None:
    rng = np.random.default_rng(requests * width + page_size)
    paged = random_paths(rng, requests=requests, width=width, nodes=nodes, page_size=page_size)
    caches = caches_of(paged.num_rows)
    before = [cache.clone() for cache in caches]
    state = SlotState(
        root=torch.zeros_like(paged.root_position),
        root_position=paged.root_position,
        page_table=paged.page_table,
        page_size=page_size,
    )
    source, target = map(torch.from_numpy, paged.moves())
    shape = PathBlock(caches=1 + width % 3)
    commit_paths(simt_loader(width), CacheTable.of(caches), paged.paths, state, paged.slot, shape)
    check_moved(caches, before, (source, target))


def test_roots_advance_to_the_bonus_token() -> None:
    paged = random_paths(np.random.default_rng(4), requests=130, width=8, nodes=9, page_size=4)
    root, position = torch.full_like(paged.root_position, 77), paged.root_position.clone()
    state = SlotState(
        root=root.clone(),
        root_position=position.clone(),
        page_table=paged.page_table,
        page_size=4,
    )
    for r, slot in enumerate(paged.slot.tolist()):
        if slot >= 0:
            root[slot] = paged.paths.bonus[r]
            position[slot] += paged.paths.length[r]
    advance_requests(simt_loader(), paged.paths, state, paged.slot)
    assert torch.equal(state.root, root) and torch.equal(state.root_position, position)
