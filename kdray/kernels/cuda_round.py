"""The ops of a device round as CUDA kernels, which a captured round replays; none reads back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths, Candidates, DraftTrees, RunningRows
from kdray.kernels import cuda_accept, cuda_commit, cuda_sampling, cuda_topk, cuda_trees
from kdray.kernels.cuda_commit import CacheTable
from kdray.kernels.cuda_sampling import CudaSampling
from kdray.kernels.loader import KernelLoader
from kdray.kernels.round_ops import Drawn, DrawRows, PlacedTrees, SlotState


def beyond_kernels(*, vocab: int, depth: int, page_size: int) -> str | None:
    """Why a model cannot run in device rounds, which have no reference to fall back to; or None."""
    if vocab > min(cuda_topk.MAX_VOCAB, cuda_sampling.MAX_VOCAB):
        return f"its {vocab} tokens are more than the kernels' {cuda_topk.MAX_VOCAB}"
    if depth > cuda_trees.MAX_DEPTH:
        return f"its drafter looks {depth} tokens ahead, the kernels take {cuda_trees.MAX_DEPTH}"
    if page_size & (page_size - 1):
        return f"pages of {page_size} tokens are no power of two"
    return None


class CudaRoundOps:
    """kernels.round_ops.RoundOps on one CUDA device.

    A list of caches is laid down in a table at its first commit, which must come before any
    capture; it stays for as long as this object, as captured rounds read it.
    """

    def __init__(self, device: torch.device, loader: KernelLoader | None = None) -> None:
        self.loader = loader or KernelLoader(device)
        self._sampling = CudaSampling(self.loader)
        self._tables: dict[tuple[int, ...], CacheTable] = {}

    def build_trees(
        self, candidates: Candidates, roots: Tensor, budgets: Tensor, base: Tensor, num_nodes: int
    ) -> PlacedTrees:
        built = cuda_trees.build_trees(
            self.loader, candidates, roots, budgets, num_nodes - 1, base=base, position=True
        )
        assert built.position is not None, "asked for"
        return PlacedTrees(trees=built.trees, position=built.position)

    def draw_tokens(self, logits: Tensor, rows: DrawRows) -> Drawn:
        return self._sampling.draw(logits, rows)

    def accept_paths(self, trees: DraftTrees, target: Tensor, depth: int) -> AcceptedPaths:
        return cuda_accept.accept_paths(self.loader, trees, target, depth).paths

    def commit_paths(
        self, caches: Sequence[Tensor], paths: AcceptedPaths, rows: RunningRows
    ) -> None:
        state = SlotState(
            root=rows.root,
            root_position=rows.root_position,
            page_table=rows.page_table,
            page_size=rows.page_size,
        )
        cuda_commit.commit_paths(self.loader, self._table(caches), paths, state)

    def advance_requests(self, state: SlotState, paths: AcceptedPaths, slot: Tensor) -> None:
        cuda_commit.advance_requests(self.loader, paths, state, slot)

    def _table(self, caches: Sequence[Tensor]) -> CacheTable:
        key = tuple(cache.data_ptr() for cache in caches)
        if key not in self._tables:
            self._tables[key] = CacheTable.of(caches)
        return self._tables[key]
