"""Device rounds on the ranks but 0: rank 0's trees come in, all else is done alike.

The trees travel by broadcast inside the round, with how their tokens are drawn, so on GPUs that is
part of its CUDA graph; what the host decides (who takes part, which page tables have changed) comes
in the header before it. Every rank draws its share of the tokens, learns all of them, and finds the
same accepted paths. Where ranks share the drafter each does its part of that, too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kdray.core.buckets import Buckets, BucketSize
from kdray.core.plan import DraftTrees, RoundOrder, RunningRows
from kdray.core.tree import WORD_BITS
from kdray.kernels.graphs import record
from kdray.kernels.page_tables import PageTables, upload
from kdray.kernels.round_ops import RoundOps
from kdray.model.drafter import DeviceDrafter
from kdray.model.parallel import Collectives
from kdray.verifier.verifier import Verifier


class FollowerRounds:
    """All rounds of one rank, of the sizes that rank 0 has, recorded in the same order."""

    def __init__(
        self,
        verifier: Verifier,
        collectives: Collectives,
        tables: PageTables,
        ops: RoundOps,
        *,
        buckets: Buckets,
        depth: int,
        drafter: DeviceDrafter | None = None,
    ) -> None:
        """depth: of a tree at most; tables: of this rank, written here alone.

        drafter: this rank's part of it; None where rank 0 drafts alone
        """
        self._tables = tables
        self._rounds = {
            size: _FollowerRound(verifier, collectives, tables, ops, size, depth, drafter)
            for size in buckets.sizes()
        }

    def capture(self, pool: Any) -> None:
        """Record every round as a CUDA graph, while rank 0 records its own: both run each once."""
        gc.collect()  # what is freed on the device while a graph is recorded would break it
        for round_of_size in self._rounds.values():
            round_of_size.capture(pool)

    @torch.inference_mode()
    def run(self, order: RoundOrder) -> None:
        """Enqueue a round; nothing is waited for."""
        self._tables.place(order.tables)
        self._rounds[order.size].run(order)


class _FollowerRound:
    def __init__(
        self,
        verifier: Verifier,
        collectives: Collectives,
        tables: PageTables,
        ops: RoundOps,
        size: BucketSize,
        depth: int,
        drafter: DeviceDrafter | None,
    ) -> None:
        (requests, num_nodes), device = size, tables.table.device
        self._nodes, self._words = num_nodes, -(-num_nodes // WORD_BITS)
        self._slot = torch.full((requests,), -1, dtype=torch.int32, device=device)
        width = sum(_widths(self._nodes, self._words))
        self._packed = torch.zeros(requests, width, dtype=torch.int32, device=device)
        self._ops = ops
        self._depth = depth
        self._verifier = verifier
        self._drafter = drafter
        self._collectives = collectives
        self._tables = tables
        self._replay: Callable[[], None] | None = None

    def capture(self, pool: Any) -> None:
        self._replay = record(self.round, pool)

    def run(self, order: RoundOrder) -> None:
        self._slot.copy_(upload(order.slot, self._slot.device))
        (self._replay or self.round)()

    @torch.inference_mode()
    def round(self) -> None:
        """Draft along, verify rank 0's trees, accept, commit."""
        page_table = self._tables.table.index_select(0, self._tables.own(self._slot))
        if self._drafter is not None and self._nodes > 1:
            unknown = torch.zeros_like(self._slot)  # rank 0's come in
            self._drafter.propose_on_device(unknown, unknown, page_table)
        self._collectives.broadcast(self._packed)
        trees, position, rows = unpack_round(
            self._packed, self._slot, self._nodes, self._words, page_table, self._tables.page_size
        )
        verified = self._verifier.verify_on_device(trees, position, rows)
        paths = self._ops.accept_paths(trees, verified.token, self._depth)
        self._verifier.commit_on_device(paths, rows)
        if self._drafter is not None:
            features, position = verified.features, rows.root_position
            self._drafter.extend_on_device(paths, features, position, page_table)


def pack_round(trees: DraftTrees, position: Tensor, rows: RunningRows) -> Tensor:
    """[R, N * (4 + W) + 10] int32: trees without scores, places, and how tokens are drawn."""
    numbers = (rows.root_position, trees.num_nodes, rows.temperature, rows.top_k)
    wide = (rows.top_p, rows.min_p, rows.seed)
    columns = (
        *(trees.token, trees.parent, trees.depth, position, trees.mask.flatten(1)),
        *(number[:, None].view(torch.int32) for number in (*numbers, *wide)),
    )
    return torch.cat(columns, dim=1).contiguous()


def unpack_round(
    packed: Tensor, slot: Tensor, nodes: int, words: int, page_table: Tensor, page_size: int
) -> tuple[DraftTrees, Tensor, RunningRows]:
    """What pack_round packed: trees (without scores), positions [R, N], rows of these slots with
    these pages."""
    whole = torch.contiguous_format  # copies: 64-bit numbers want an even place
    parts = packed.split(_widths(nodes, words), dim=1)
    token, parent, depth, position, mask, *numbers = (
        part.clone(memory_format=whole) for part in parts
    )
    root_position, num_nodes, temperature, top_k, top_p, min_p, seed = numbers
    trees = DraftTrees(
        token=token,
        parent=parent,
        depth=depth,
        score=token,
        mask=mask.unflatten(1, (nodes, words)),
        num_nodes=num_nodes[:, 0],
    )
    rows = RunningRows(
        slot=slot,
        root=token[:, 0],
        root_position=root_position[:, 0],
        page_table=page_table,
        page_size=page_size,
        temperature=temperature.view(torch.float32)[:, 0],
        top_k=top_k[:, 0],
        top_p=top_p.view(torch.float64)[:, 0],
        min_p=min_p.view(torch.float64)[:, 0],
        seed=seed.view(torch.int64)[:, 0],
    )
    return trees, position, rows


def _widths(nodes: int, words: int) -> list[int]:
    """Columns of a packed round, part by part."""
    return [nodes, nodes, nodes, nodes, nodes * words, 1, 1, 1, 1, 2, 2, 2]
