"""The ops of a device round in torch, by way of the host: the oracle of cuda_round.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths, Candidates, DraftTrees, RunningRows
from kdray.core.request import SamplingParams
from kdray.kernels.ops import SamplingRows
from kdray.kernels.reference import ReferenceOps
from kdray.kernels.reference_sampling import sample_tokens
from kdray.kernels.round_ops import Drawn, DrawRows, PlacedTrees, SlotState


class ReferenceRoundOps:
    """kernels.round_ops.RoundOps without a kernel of our own; it reads what it works on."""

    def __init__(self, device: torch.device) -> None:
        self._ops = ReferenceOps(device)

    def build_trees(
        self, candidates: Candidates, roots: Tensor, budgets: Tensor, base: Tensor, num_nodes: int
    ) -> PlacedTrees:
        wishes = budgets.clamp(0, num_nodes - 1).tolist()
        trees = self._ops.build_padded_trees(candidates, roots, wishes, num_nodes)
        return PlacedTrees(trees=trees, position=base[:, None].int() + trees.depth)

    def draw_tokens(self, logits: Tensor, rows: DrawRows) -> Drawn:
        finite = ~(logits.isnan() | logits.isneginf())
        dead = ~finite.any(dim=1)
        values = torch.where(dead[:, None], torch.zeros_like(logits), logits)
        token = sample_tokens(values.float().cpu().numpy(), _sampling_rows(rows))
        drawn = torch.from_numpy(token).to(logits.device)
        return Drawn(token=drawn.masked_fill(dead, 0), dead=dead.int())

    def accept_paths(self, trees: DraftTrees, target: Tensor, depth: int) -> AcceptedPaths:
        return self._ops.accept_paths(trees, target, depth)

    def commit_paths(
        self, caches: Sequence[Tensor], paths: AcceptedPaths, rows: RunningRows
    ) -> None:
        step = torch.arange(paths.node.shape[1], device=paths.node.device)
        moves = (step < paths.length[:, None]) & (paths.node != step)
        request, place = moves.nonzero(as_tuple=True)
        source = _slots(rows, request, paths.node[request, place])
        self._ops.commit_kv(caches, source, _slots(rows, request, place))

    def advance_requests(self, state: SlotState, paths: AcceptedPaths, slot: Tensor) -> None:
        real = slot >= 0
        own = slot[real].long()
        state.root[own] = paths.bonus[real]
        state.root_position[own] += paths.length[real]


def _sampling_rows(rows: DrawRows) -> SamplingRows:
    columns = {f.name: getattr(rows, f.name) for f in fields(rows) if f.name != "drops"}
    host = {name: column.tolist() for name, column in columns.items()}
    count = len(host["seed"])
    params = [
        SamplingParams(
            temperature=host["temperature"][i],
            top_k=host["top_k"][i],
            top_p=host["top_p"][i],
            min_p=host["min_p"][i],
        )
        for i in range(count)
    ]
    return SamplingRows(
        params=params,
        seed=host["seed"],
        position=host["position"],
        history=[None] * count,
        end_token_ids=[frozenset()] * count,
    )


def _slots(rows: RunningRows, request: Tensor, node: Tensor) -> Tensor:
    place = rows.root_position[request].long() + node
    page = rows.page_table[request, place // rows.page_size].long()
    slot: Tensor = page * rows.page_size + place % rows.page_size
    return slot
