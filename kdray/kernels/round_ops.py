"""The ops of a round that never asks the host: state in, state out, on one device.

The same verbs as in ops.py, with what changes from step to step in tensors and every shape fixed by
R requests and N nodes, so that a round may be captured as a CUDA graph. Two implementations:
reference_round.py in torch, cuda_round.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths, Candidates, DraftTrees, RunningRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedTrees:
    """Draft trees and the place of every node in its text, position [R, N] int32."""

    trees: DraftTrees
    position: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawRows:
    """How M rows are drawn, on the device.

    temperature     [M] float32, 0: greedy    top_k   [M] int32, 0: all
    top_p, min_p    [M] float64               seed    [M] int64      position   [M] int32
    drops           False where no row drops any token
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    drops: bool

    def select(self, own: Tensor) -> DrawRows:
        """The rows numbered own [S] int64."""
        return replace(
            self,
            temperature=self.temperature.index_select(0, own),
            top_k=self.top_k.index_select(0, own),
            top_p=self.top_p.index_select(0, own),
            min_p=self.min_p.index_select(0, own),
            seed=self.seed.index_select(0, own),
            position=self.position.index_select(0, own),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """token [M] int32; dead [M] int32: 1 where no logit was finite (its token is 0 and means
    nothing)."""

    token: Tensor
    dead: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotState:
    """Where every running request stands, kept on the device from step to step; S slots.

    root            [S] int32: the token without KV, root of the next tree
    root_position   [S] int32: its cache position, which is the number of tokens with KV
    page_table      [S, P] int32
    """

    root: Tensor
    root_position: Tensor
    page_table: Tensor
    page_size: int


class RoundOps(Protocol):
    """Chosen once, by load_round_ops(device)."""

    def build_trees(
        self, candidates: Candidates, roots: Tensor, budgets: Tensor, base: Tensor, num_nodes: int
    ) -> PlacedTrees:
        """Ops.build_trees, budgets [R] int32 cut to num_nodes - 1; base [R]: the roots' places."""
        ...

    def draw_tokens(self, logits: Tensor, rows: DrawRows) -> Drawn:
        """Addressed sampling (core.sampling) of logits [M, V] float32."""
        ...

    def accept_paths(self, trees: DraftTrees, target: Tensor, depth: int) -> AcceptedPaths:
        """As Ops.accept_paths."""
        ...

    def commit_paths(
        self, caches: Sequence[Tensor], paths: AcceptedPaths, rows: RunningRows
    ) -> None:
        """Move the KV of every accepted node to its place behind its root, in all the caches."""
        ...

    def advance_requests(self, state: SlotState, paths: AcceptedPaths, slot: Tensor) -> None:
        """root = bonus, root_position += length, at slot [R] int32; below 0: a row of padding."""
        ...


def load_round_ops(device: str | torch.device) -> RoundOps:
    """The implementation for a device."""
    device = torch.device(device)
    if device.type == "cuda":
        from kdray.kernels.cuda_round import CudaRoundOps

        return CudaRoundOps(device)
    from kdray.kernels.reference_round import ReferenceRoundOps

    return ReferenceRoundOps(device)
