"""The driver's graphs with the shipped drafter: round after round equal to eager steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kdray.core.plan import DraftTrees, PlannedRequest, StepPlan
from kdray.core.request import SamplingParams
from kdray.core.tree import FRACTION_BITS, DraftTree, follow
from kdray.demo import drafter_path, target_path
from kdray.driver.graphs import CommitGraph, DraftGraph
from kdray.kernels.cuda import CudaOps
from kdray.kernels.cuda_commit import SlotState
from kdray.model.drafter import DFlashDrafter

pytestmark = pytest.mark.gpu

REQUESTS, PAGES, PAGE_SIZE, BUDGET, ROUNDS = 3, 12, 16, 16, 12
LAYERS, WIDTH = 4, 80
PREFIX = [9, 40, 1]


def load(ops: CudaOps, device: torch.device) -> DFlashDrafter:
    drafter = DFlashDrafter.load(
        drafter_path(), target_path(), ops=ops, candidates=8, page_size=PAGE_SIZE,
        num_pages=REQUESTS * PAGES, dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    for cache in drafter.cache:
        cache.fill_(float("nan"))
    return drafter


def page_table(device: torch.device) -> Tensor:
    pages = np.random.default_rng(0).permutation(REQUESTS * PAGES).astype(np.int32)
    return torch.from_numpy(pages.reshape(REQUESTS, PAGES)).to(device)


def learn_prefix(drafter: DFlashDrafter, table: Tensor, features: Tensor) -> None:
    """Random features of the prefixes, as a prefill leaves them."""
    for r, length in enumerate(PREFIX):
        position = torch.arange(length, device=table.device)
        slots = table[r].long()[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        layers = drafter.network.context_kv(features[r, :length], position)
        for cache, kv in zip(drafter.cache, layers, strict=True):
            cache[slots] = kv


def planned(r: int, root: int, position: int, budget: int, pages: Tensor) -> PlannedRequest:
    return PlannedRequest(
        request_id=str(r), slot=r, num_cached=position, known=np.array([root], dtype=np.int32),
        budget=budget, pages=pages.cpu().numpy(), samples=True, sampling=SamplingParams(), seed=0,
        num_prompt=1,
    )  # fmt: skip


def host_tree(trees: DraftTrees, r: int) -> DraftTree:
    n = int(trees.num_nodes[r])
    columns = (trees.token, trees.parent, trees.depth, trees.score)
    return DraftTree(*(column[r, :n].cpu().numpy() for column in columns))


def lucky_target(trees: DraftTrees, rng: np.random.Generator) -> Tensor:
    """Tokens that follow some child at most nodes, so that paths of all lengths come up."""
    token, parent = trees.token.cpu().numpy(), trees.parent.cpu().numpy()
    target = rng.integers(0, 1900, token.shape).astype(np.int32)
    for r, i in np.ndindex(token.shape):
        if i < int(trees.num_nodes[r]) and parent[r, i] >= 0 and rng.random() < 0.9:
            target[r, parent[r, i]] = token[r, i]
    return torch.from_numpy(target).to(trees.token.device)


def test_rounds_of_graphs_equal_eager_rounds(device: torch.device) -> None:
    ops, rng = CudaOps(device), np.random.default_rng(4)
    table = page_table(device)
    width = 4 * 256
    prefix = torch.randn(REQUESTS, 64, width, device=device).bfloat16()
    graphed, eager = load(ops, device), load(ops, device)
    for drafter in (graphed, eager):
        learn_prefix(drafter, table, prefix)
    caches = [
        torch.randn(REQUESTS * PAGES * PAGE_SIZE, WIDTH, device=device).bfloat16()
        for _ in range(LAYERS)
    ]
    wanted_caches = [cache.clone() for cache in caches]
    state = SlotState(
        root=torch.tensor([5, 6, 7], dtype=torch.int32, device=device),
        root_position=torch.tensor(PREFIX, dtype=torch.int32, device=device),
        page_table=table,
        page_size=PAGE_SIZE,
    )
    draft = DraftGraph.capture(graphed, ops.loader, state, max_budget=BUDGET)
    commit = CommitGraph.capture(
        graphed, ops.loader, state, draft.built.trees, caches, feature_width=width
    )
    roots, positions = [5, 6, 7], list(PREFIX)
    lengths_seen: set[int] = set()
    for _ in range(ROUNDS):
        budgets = rng.integers(1, BUDGET + 1, REQUESTS).tolist()
        draft.budgets.copy_(torch.tensor(budgets, dtype=torch.int32))
        trees = draft.replay()
        plan = StepPlan(
            step=0,
            requests=tuple(
                planned(r, roots[r], positions[r], budgets[r], table[r]) for r in range(REQUESTS)
            ),
        )
        root_tensor = torch.tensor(roots, dtype=torch.int32, device=device)
        position_tensor = torch.tensor(positions, dtype=torch.int32, device=device)
        candidates = eager.propose_on_device(root_tensor, position_tensor, table)
        by_plan = eager.propose(plan, root_tensor)  # other kernels, so other last bits of bf16
        assert (candidates.score[:, :, 0] - by_plan.score[:, :, 0]).abs().max() < 2**FRACTION_BITS
        expected = ops.build_trees(candidates, root_tensor, budgets)
        for r in range(REQUESTS):
            n = int(expected.num_nodes[r])
            assert int(trees.num_nodes[r]) == n
            for name in ("token", "parent", "depth"):
                assert torch.equal(getattr(trees, name)[r, :n], getattr(expected, name)[r, :n])
        commit.target.copy_(lucky_target(trees, rng))
        commit.features.copy_(torch.randn(REQUESTS, 1 + BUDGET, width, device=device))
        paths = commit.replay()
        flat = torch.cat(
            [commit.features[r, : int(expected.num_nodes[r])] for r in range(REQUESTS)]
        )
        starts = np.concatenate([[0], np.cumsum(expected.num_nodes.tolist())]).tolist()
        eager.extend(plan, paths, flat, starts)
        for r in range(REQUESTS):
            path = follow(host_tree(trees, r), commit.target[r].cpu().numpy())
            assert paths.node[r, : int(paths.length[r])].tolist() == list(path.node)
            assert int(paths.bonus[r]) == path.bonus
            place = [positions[r] + step for step in range(len(path.node))]
            source = [positions[r] + node for node in path.node]
            for cache in wanted_caches:
                cache[slots(table[r], place)] = cache[slots(table[r], source)].clone()
            positions[r] += len(path.node)
            roots[r] = path.bonus
            lengths_seen.add(len(path.node))
        assert state.root.tolist() == roots and state.root_position.tolist() == positions
        for cache, wanted in zip(caches, wanted_caches, strict=True):
            assert torch.equal(cache, wanted)
    assert len(lengths_seen) >= 3, lengths_seen


def slots(pages: Tensor, positions: list[int]) -> Tensor:
    position = torch.tensor(positions, device=pages.device)
    return pages.long()[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
