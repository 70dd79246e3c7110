"""The two halves of a round as CUDA graphs: replayed with changing inputs, equal every time."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths, Candidates, DraftTrees
from kdray.kernels.cuda_accept import Acceptance, accept_paths
from kdray.kernels.cuda_commit import CacheTable, SlotState, advance_requests, commit_paths
from kdray.kernels.cuda_topk import CudaTopk
from kdray.kernels.cuda_trees import BuiltTrees, build_trees_into, empty_trees
from kdray.kernels.loader import KernelLoader
from kdray.kernels.reference import ReferenceOps
from tests.kernels.random_paths import PagedPaths, random_paths
from tests.kernels.random_trees import random_trees, walking_target

pytestmark = pytest.mark.gpu

REQUESTS, NODES, DEPTH, PAGE_SIZE = 12, 17, 7, 16
LAYERS, REPLAYS = 5, 20
ROOM = (REPLAYS + 2) * (1 + DEPTH) + NODES  # positions behind the roots
VOCAB, CANDIDATES = 5000, 16


@dataclass(frozen=True)
class DraftRound:
    """Static buffers of logits-to-tree: what a graph reads and writes.

    logits [R, L, V] bfloat16; roots, budgets, base [R] int32
    """

    logits: Tensor
    roots: Tensor
    budgets: Tensor
    base: Tensor
    out: BuiltTrees

    def run(self, loader: KernelLoader, topk: CudaTopk) -> Candidates:
        token, score = topk.topk_logprob(self.logits, CANDIDATES)
        candidates = Candidates(token=token, score=score)
        build_trees_into(loader, self.out, candidates, self.roots, self.budgets, base=self.base)
        return candidates


def fresh_draft(rng: np.random.Generator, device: torch.device, round_up: float) -> DraftRound:
    """Random inputs, of which some budgets are 0; `round_up` is the grid of the logits."""
    logits = np.round(rng.normal(0.0, 3.0, (REQUESTS, DEPTH, VOCAB)) / round_up) * round_up
    numbers = [rng.integers(0, most, REQUESTS) for most in (VOCAB, NODES, 10_000)]
    numbers[1][0] = 0
    return DraftRound(
        torch.from_numpy(logits).to(device, torch.bfloat16),
        *(torch.from_numpy(column.astype(np.int32)).to(device) for column in numbers),
        out=empty_trees(REQUESTS, NODES, device, position=True, links=True),
    )


def test_logits_to_tree_as_a_graph(loader: KernelLoader) -> None:
    rng = np.random.default_rng(22)
    topk = CudaTopk(loader)
    static = fresh_draft(rng, loader.device, 1.0)
    static.run(loader, topk)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        candidates = static.run(loader, topk)
    for replay in range(REPLAYS):
        eager = fresh_draft(rng, loader.device, 0.5 if replay % 2 else 1e-3)
        for name in ("logits", "roots", "budgets", "base"):
            getattr(static, name).copy_(getattr(eager, name))
        graph.replay()
        expected = eager.run(loader, topk)
        assert torch.equal(candidates.token, expected.token)
        assert torch.equal(candidates.score, expected.score)
        for name in ("position", "first_child", "next_sibling"):
            assert torch.equal(getattr(static.out, name), getattr(eager.out, name))
        reference = ReferenceOps(torch.device("cpu")).build_trees(
            Candidates(token=candidates.token.cpu(), score=candidates.score.cpu()),
            eager.roots.cpu(),
            [*eager.budgets.tolist()[:-1], NODES - 1],
        )
        last = slice(None, -1)  # the reference was given the greatest budget there: N is its own
        for column in fields(DraftTrees):
            built = getattr(static.out.trees, column.name)
            assert torch.equal(built, getattr(eager.out.trees, column.name))
            assert torch.equal(built[last].cpu(), getattr(reference, column.name)[last])


@dataclass(frozen=True)
class CommitRound:
    """Static buffers of accept-to-commit: what a graph reads and writes."""

    trees: DraftTrees
    target: Tensor
    slot: Tensor
    state: SlotState
    caches: list[Tensor]
    table: CacheTable

    def run(self, loader: KernelLoader) -> Acceptance:
        accepted = accept_paths(loader, self.trees, self.target, DEPTH)
        commit_paths(loader, self.table, accepted.paths, self.state, self.slot)
        advance_requests(loader, accepted.paths, self.state, self.slot)
        return accepted


def start(rng: np.random.Generator, device: torch.device) -> CommitRound:
    """Empty buffers, and slots with pages for all the rounds of the test."""
    far = random_paths(rng, requests=REQUESTS, width=2, nodes=ROOM, page_size=PAGE_SIZE)
    state = SlotState(
        root=torch.zeros_like(far.root_position, device=device),
        root_position=far.root_position.to(device),
        page_table=far.page_table.to(device),
        page_size=PAGE_SIZE,
    )
    caches = [torch.randn(far.num_rows, 576, device=device).bfloat16() for _ in range(LAYERS)]
    caches.append(torch.randn(far.num_rows, 2, 24, device=device))
    trees = random_trees(rng, REQUESTS, NODES, bushy=0.3)
    return CommitRound(
        trees=DraftTrees(**{f.name: getattr(trees, f.name).to(device) for f in fields(trees)}),
        target=torch.zeros(REQUESTS, NODES, dtype=torch.int32, device=device),
        slot=far.slot.to(device),
        state=state,
        caches=caches,
        table=CacheTable.of(caches),
    )


def test_accept_to_commit_as_a_graph(loader: KernelLoader) -> None:
    rng = np.random.default_rng(21)
    buffers = start(rng, loader.device)
    buffers.run(loader)  # loads the kernels; what it moved is overwritten below
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accepted = buffers.run(loader)
    lengths = []
    for _ in range(REPLAYS):
        trees = random_trees(rng, REQUESTS, NODES, bushy=0.3)
        target = walking_target(rng, trees, far=0.9)
        slot = torch.from_numpy(rng.permutation(buffers.slot.cpu().numpy()))
        fill(buffers.trees, trees)
        buffers.target.copy_(target)
        buffers.slot.copy_(slot)
        before = snapshot(buffers, slot)
        graph.replay()
        paths = ReferenceOps(torch.device("cpu")).accept_paths(trees, target, DEPTH)
        for column in fields(AcceptedPaths):
            found = getattr(accepted.paths, column.name)
            assert torch.equal(found.cpu(), getattr(paths, column.name))
        assert not accepted.malformed.any()
        before.after(paths)
        for cache, expected in zip(buffers.caches, before.caches, strict=True):
            assert torch.equal(cache, expected)
        assert torch.equal(buffers.state.root.cpu(), before.root)
        assert torch.equal(buffers.state.root_position.cpu(), before.root_position)
        lengths += paths.length.tolist()
    assert max(lengths) == 1 + DEPTH and min(lengths) == 1


@dataclass(frozen=True)
class Snapshot:
    """What a round starts from, and what the reference makes of it."""

    slot: Tensor
    root: Tensor
    root_position: Tensor
    page_table: Tensor
    caches: list[Tensor]

    def after(self, paths: AcceptedPaths) -> None:
        paged = PagedPaths(
            paths=paths,
            slot=self.slot,
            root_position=self.root_position,
            page_table=self.page_table,
            page_size=PAGE_SIZE,
        )
        source, target = (
            torch.from_numpy(rows).to(self.caches[0].device) for rows in paged.moves()
        )
        for cache in self.caches:
            cache[target] = cache[source]
        for r, slot in enumerate(self.slot.tolist()):
            if slot >= 0:
                self.root[slot] = paths.bonus[r]
                self.root_position[slot] += paths.length[r]


def snapshot(buffers: CommitRound, slot: Tensor) -> Snapshot:
    return Snapshot(
        slot=slot,
        root=buffers.state.root.cpu(),
        root_position=buffers.state.root_position.cpu(),
        page_table=buffers.state.page_table.cpu(),
        caches=[cache.clone() for cache in buffers.caches],
    )


def fill(static: DraftTrees, trees: DraftTrees) -> None:
    for column in fields(DraftTrees):
        getattr(static, column.name).copy_(getattr(trees, column.name))
