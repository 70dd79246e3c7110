"""One rank: verifies draft trees with its shard of the target, and keeps its KV."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kdray.core.plan import (
    AcceptedPaths,
    DeviceVerified,
    DraftTrees,
    RunningRows,
    StepPlan,
    Verified,
)
from kdray.kernels.attention_batch import DeviceAttentionBatch
from kdray.kernels.ops import LiveRows, Ops
from kdray.kernels.round_ops import DrawRows, RoundOps
from kdray.model.batch import ForwardBatch, TargetOutput
from kdray.model.target import TargetModel
from kdray.verifier.draw import draw
from kdray.verifier.kv_cache import KVCache
from kdray.verifier.layout import StepLayout, lay_out
from kdray.verifier.step_passes import StepPasses


class Verifier:
    """A shard of the target model with its cache.

    The rank that draws tokens (rank 0) uses the result of verify; the others run the same forward
    pass for its collectives and their part of the KV.
    """

    def __init__(
        self,
        model: TargetModel,
        cache: KVCache,
        ops: Ops,
        *,
        draws: bool = True,
        round_ops: RoundOps | None = None,
        passes: StepPasses | None = None,
    ) -> None:
        """round_ops: for the steps that run without the host; None where there are none.

        passes: of this model over this cache; None: such steps are launched kernel by kernel
        """
        self.model = model
        self.cache = cache
        self._ops = ops
        self._round_ops = round_ops
        self.passes = passes
        self._draws = draws
        self._device = cache.layers[0].device
        self._layout: StepLayout | None = None

    @torch.inference_mode()
    def verify(self, plan: StepPlan, trees: DraftTrees) -> Verified:
        """Run the plan's rows, write their KV, draw the target's token after every node."""
        layout = lay_out(plan, trees, self.cache.page_size, self._device)
        self._layout = layout
        output = self._forward(layout)
        token = torch.zeros_like(trees.token)
        broken: frozenset[int] = frozenset()
        if len(layout.drawn_rows):
            logits = self.model.logits(output.hidden[layout.drawn_rows])
            if self._draws:
                drawn = draw(self._ops, logits, layout)
                token[layout.drawn_at] = drawn.token.to(token.dtype)
                broken = drawn.broken
        return Verified(token=token, features=output.features, broken=broken)

    def _forward(self, layout: StepLayout) -> TargetOutput:
        size = self.passes.size_for(layout) if self.passes is not None else None
        if self.passes is None or size is None:
            return self.model.forward(layout.batch, self.cache.layers)
        return self.passes.run(size, layout)

    @torch.inference_mode()
    def commit(self, paths: AcceptedPaths) -> None:
        """Make the accepted KV of the step just verified contiguous behind what was cached."""
        layout, self._layout = self._layout, None
        assert layout is not None, "commit follows verify"
        if layout.plan.max_budget == 0:
            return  # known tokens are in place, and reading the paths would wait for the device
        source, target = accepted_slots(layout, paths, self.cache.page_size)
        if len(source):
            self._ops.commit_kv(self.cache.rows, source.to(self._device), target.to(self._device))

    @torch.inference_mode()
    def verify_on_device(
        self, trees: DraftTrees, position: Tensor, rows: RunningRows
    ) -> DeviceVerified:
        """verify for decoding requests, all of it on the device (core.plan.DeviceVerifierGroup)."""
        assert self._round_ops is not None, "made without round_ops"
        requests, nodes = trees.token.shape
        batch = rows_on_device(trees, position, rows)
        output = self.model.forward(batch, self.cache.layers)
        token, dead = self._draw_on_device(output.hidden, draw_rows(position, rows))
        return DeviceVerified(
            token=token.view(requests, nodes),
            dead=dead.view(requests, nodes),
            features=output.features.view(requests, nodes, -1),
        )

    def _draw_on_device(self, hidden: Tensor, rows: DrawRows) -> tuple[Tensor, Tensor]:
        """Tokens and dead rows, [M] each and the same on every rank: each draws its share."""
        assert self._round_ops is not None, "made without round_ops"
        shard, count = self.model.shard, len(hidden)
        logits = self.model.dealt_logits(hidden)
        if shard.size == 1:
            drawn = self._round_ops.draw_tokens(logits, rows)
            return drawn.token, drawn.dead
        first = shard.rank * len(logits)
        own = torch.arange(first, first + len(logits), device=hidden.device).clamp_max(count - 1)
        drawn = self._round_ops.draw_tokens(logits, rows.select(own))
        both = self.model.collectives.all_gather(torch.stack([drawn.token, drawn.dead]))
        return both[0, :count].contiguous(), both[1, :count].contiguous()

    @torch.inference_mode()
    def commit_on_device(self, paths: AcceptedPaths, rows: RunningRows) -> None:
        assert self._round_ops is not None, "made without round_ops"
        self._round_ops.commit_paths(self.cache.rows, paths, rows)


def rows_on_device(trees: DraftTrees, position: Tensor, rows: RunningRows) -> ForwardBatch:
    """The R * N rows of a device round; node i's scratch place is i behind the root's."""
    nodes = trees.token.shape[1]
    node = torch.arange(nodes, device=position.device)
    place = rows.root_position.long()[:, None] + node
    page = rows.page_table.long().gather(1, place // rows.page_size)
    return ForwardBatch(
        token=trees.token.flatten().long(),
        position=position.flatten().long(),
        slot=(page * rows.page_size + place % rows.page_size).flatten(),
        attention=DeviceAttentionBatch(
            num_cached=rows.root_position,
            num_nodes=trees.num_nodes,
            page_table=rows.page_table,
            page_size=rows.page_size,
            mask=trees.mask,
        ),
        live=LiveRows(slot=rows.slot, num_nodes=trees.num_nodes, nodes=nodes),
    )


def draw_rows(position: Tensor, rows: RunningRows) -> DrawRows:
    """How the token behind every node is drawn; position [R, N]."""
    nodes = position.shape[1]
    return DrawRows(
        temperature=rows.temperature.repeat_interleave(nodes),
        top_k=rows.top_k.repeat_interleave(nodes),
        top_p=rows.top_p.repeat_interleave(nodes),
        min_p=rows.min_p.repeat_interleave(nodes),
        seed=rows.seed.repeat_interleave(nodes),
        position=position.flatten() + 1,
        drops=True,
    )


def accepted_slots(
    layout: StepLayout, paths: AcceptedPaths, page_size: int
) -> tuple[Tensor, Tensor]:
    """Slots that move: from each accepted node's scratch place to its place in the text.

    Nodes already in place are left out. Returns two [M] int64 tensors.
    """
    node, length = paths.node.cpu().numpy(), paths.length.tolist()
    sources, targets = [], []
    for r, request in enumerate(layout.plan.requests):
        path = node[r, : length[r]].astype(np.int64)
        places = np.arange(len(path), dtype=np.int64)
        moves = path != places
        if moves.any():
            sources.append(request.slots_at(request.root_position + path[moves], page_size))
            targets.append(request.slots_at(request.root_position + places[moves], page_size))
    empty = np.zeros(0, dtype=np.int64)
    return (
        torch.from_numpy(np.concatenate([empty, *sources])),
        torch.from_numpy(np.concatenate([empty, *targets])),
    )
