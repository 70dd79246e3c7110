"""Device rounds on the ranks that neither draft nor draw: rank 0's trees come in, its paths follow.

Both travel by broadcast inside the round, so on GPUs they are part of its CUDA graph; what the host
decides (who takes part, which page tables have changed) comes in the header before it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kdray.core.buckets import Buckets, BucketSize
from kdray.core.plan import AcceptedPaths, DraftTrees, RoundOrder, RunningRows
from kdray.core.tree import WORD_BITS
from kdray.kernels.graphs import record
from kdray.kernels.page_tables import PageTables, upload
from kdray.model.parallel import Collectives
from kdray.verifier.verifier import Verifier


class FollowerRounds:
    """All rounds of one rank, of the sizes that rank 0 has, recorded in the same order."""

    def __init__(
        self,
        verifier: Verifier,
        collectives: Collectives,
        tables: PageTables,
        *,
        buckets: Buckets,
        depth: int,
    ) -> None:
        """depth: of a tree at most; tables: of this rank, written here alone."""
        self._tables = tables
        self._rounds = {
            size: _FollowerRound(verifier, collectives, tables, size, depth)
            for size in buckets.sizes()
        }

    def capture(self) -> None:
        """Record every round as a CUDA graph, while rank 0 records its own: both run each once."""
        pool = torch.cuda.graph_pool_handle()
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
        size: BucketSize,
        depth: int,
    ) -> None:
        (requests, num_nodes), device = size, tables.table.device
        words = -(-num_nodes // WORD_BITS)
        self._size = num_nodes, words
        self._slot = torch.full((requests,), -1, dtype=torch.int32, device=device)
        width = num_nodes * (2 + words) + 2
        self._trees = torch.zeros(requests, width, dtype=torch.int32, device=device)
        self._paths = torch.zeros(requests, depth + 3, dtype=torch.int32, device=device)
        self._verifier = verifier
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
        """Verify rank 0's trees, commit its paths."""
        self._collectives.broadcast(self._trees)
        trees, position, root_position = unpack_round(self._trees, *self._size)
        page_table = self._tables.table.index_select(0, self._tables.own(self._slot))
        rows = _rows(trees, root_position, page_table, self._tables.page_size)
        self._verifier.verify_on_device(trees, position, rows)
        self._collectives.broadcast(self._paths)
        self._verifier.commit_on_device(unpack_paths(self._paths), rows)


def _rows(
    trees: DraftTrees, root_position: Tensor, page_table: Tensor, page_size: int
) -> RunningRows:
    """Without how tokens are drawn, which is rank 0's business."""
    nothing = root_position.new_zeros(root_position.shape)
    return RunningRows(
        root=trees.token[:, 0],
        root_position=root_position,
        page_table=page_table,
        page_size=page_size,
        temperature=nothing.float(),
        top_k=nothing,
        top_p=nothing.double(),
        min_p=nothing.double(),
        seed=nothing.long(),
    )


def pack_round(trees: DraftTrees, position: Tensor, rows: RunningRows) -> Tensor:
    """[R, N * (2 + W) + 2] int32: tokens, positions, mask words, node count, root position."""
    columns = (trees.token, position, trees.mask.flatten(1))
    counts = (trees.num_nodes[:, None], rows.root_position[:, None])
    return torch.cat([*columns, *counts], dim=1).contiguous()


def unpack_round(packed: Tensor, nodes: int, words: int) -> tuple[DraftTrees, Tensor, Tensor]:
    """Trees without parents, depths and scores; positions [R, N]; root positions [R]."""
    sizes = [nodes, nodes, nodes * words, 1, 1]
    token, position, mask, num_nodes, root_position = packed.split(sizes, dim=1)
    trees = DraftTrees(
        token=token,
        parent=token,
        depth=token,
        score=token,
        mask=mask.unflatten(1, (nodes, words)).contiguous(),
        num_nodes=num_nodes[:, 0].contiguous(),
    )
    return trees, position, root_position[:, 0].contiguous()


def pack_paths(paths: AcceptedPaths) -> Tensor:
    """[R, D + 2] int32: nodes, length, bonus."""
    return torch.cat([paths.node, paths.length[:, None], paths.bonus[:, None]], dim=1).contiguous()


def unpack_paths(packed: Tensor) -> AcceptedPaths:
    return AcceptedPaths(
        node=packed[:, :-2].contiguous(),
        length=packed[:, -2].contiguous(),
        bonus=packed[:, -1].contiguous(),
    )
