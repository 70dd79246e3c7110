"""The driver's two halves of a round as CUDA graphs: roots to trees, and tokens to committed KV.

What changes from step to step lies in device tensors that the graphs read and write; shapes are
those of a bucket of R requests and N nodes. Nothing waits for the host. Between the halves stands
the verify pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths, DraftTrees
from kdray.kernels.cuda_accept import Acceptance, accept_paths
from kdray.kernels.cuda_commit import CacheTable, SlotState, advance_requests, commit_paths
from kdray.kernels.cuda_trees import BuiltTrees, build_trees_into, empty_trees
from kdray.kernels.loader import KernelLoader
from kdray.model.drafter import DFlashDrafter


@dataclass(frozen=True, eq=False)
class DraftGraph:
    """Roots to draft trees: drafter, head, top-k, tree builder.

    state     R running requests; the graph reads roots, root positions and page tables
    budgets   [R] int32 draft nodes wanted; write to it before a replay
    built     the trees, with positions, made anew by every replay
    """

    graph: torch.cuda.CUDAGraph
    state: SlotState
    budgets: Tensor
    built: BuiltTrees

    @classmethod
    def capture(
        cls, drafter: DFlashDrafter, loader: KernelLoader, state: SlotState, *, max_budget: int
    ) -> DraftGraph:
        """Runs once to load every kernel, then records. The state is left as it is."""
        requests, device = len(state.root), state.root.device
        budgets = torch.full((requests,), max_budget, dtype=torch.int32, device=device)
        built = empty_trees(requests, 1 + max_budget, device, position=True)

        def run() -> None:
            candidates = drafter.propose_on_device(
                state.root, state.root_position, state.page_table
            )
            build_trees_into(
                loader, built, candidates, state.root, budgets, base=state.root_position
            )

        return cls(_record(run), state, budgets, built)

    def replay(self) -> DraftTrees:
        self.graph.replay()
        return self.built.trees


@dataclass(frozen=True, eq=False)
class CommitGraph:
    """Target tokens to committed KV: accept, move the target's KV, teach the drafter, advance.

    target     [R, N] int32 the target's token after every node; write to it before a replay
    features   [R, N, F] what the drafter reads of every node; likewise
    accepted   paths and bonus tokens; afterwards state.root and state.root_position are the next
    table      where the caches lie: the graph reads it, so it lives as long
    """

    graph: torch.cuda.CUDAGraph
    table: CacheTable
    target: Tensor
    features: Tensor
    accepted: Acceptance

    @classmethod
    def capture(
        cls,
        drafter: DFlashDrafter,
        loader: KernelLoader,
        state: SlotState,
        trees: DraftTrees,
        caches: list[Tensor],
        *,
        feature_width: int,
    ) -> CommitGraph:
        """Records the commit of `trees` into `caches` (the target's) and the drafter's own.

        The run that loads the kernels works on a copy of the state and moves nothing that is kept:
        its tokens match no child.
        """
        requests, nodes = trees.token.shape
        target = torch.full((requests, nodes), -1, dtype=torch.int32, device=trees.token.device)
        features = torch.zeros(
            requests, nodes, feature_width, dtype=caches[0].dtype, device=trees.token.device
        )
        table = CacheTable.of(caches)
        kept = state.root.clone(), state.root_position.clone()
        spare = [cache.clone() for cache in drafter.cache]

        def run() -> Acceptance:
            accepted = accept_paths(loader, trees, target, drafter.depth)
            paths: AcceptedPaths = accepted.paths
            commit_paths(loader, table, paths, state)
            drafter.extend_on_device(paths, features, state.root_position, state.page_table)
            advance_requests(loader, paths, state)
            return accepted

        outputs: list[Acceptance] = []
        graph = _record(lambda: outputs.append(run()))
        state.root.copy_(kept[0])
        state.root_position.copy_(kept[1])
        for cache, before in zip(drafter.cache, spare, strict=True):
            cache.copy_(before)
        return cls(graph, table, target, features, outputs[-1])

    def replay(self) -> AcceptedPaths:
        self.graph.replay()
        return self.accepted.paths


def _record(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what `run` enqueues, after one run on a side stream that loads everything."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
