"""Who may see whom: the batches of the attention ops, shapes as ops.py names them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionBatch:
    """Who may see whom in one step.

    Request r owns rows row_start[r] .. row_start[r + 1]: num_known[r] known tokens, then the draft
    nodes 1 .. of its tree (the last known token is node 0). Row i's own KV is at cache position
    num_cached[r] + i. A known row sees every position up to its own; a draft node sees all cached
    and all known positions and, of the draft nodes, its ancestors and itself.

    row_start    R + 1 offsets          num_cached, num_known   R host integers each
    page_table   [R, P] int32 page ids; position p of request r is slot
                 page_table[r, p // page_size] * page_size + p % page_size
    mask         [R, N, W] int32 ancestor bits, as in DraftTrees
    """

    row_start: tuple[int, ...]
    num_cached: tuple[int, ...]
    num_known: tuple[int, ...]
    page_table: Tensor
    page_size: int
    mask: Tensor

    @cached_property
    def slots(self) -> Tensor:
        """[R, P * page_size] int64: the cache slot of every position of every request."""
        offsets = torch.arange(self.page_size, device=self.page_table.device)
        return (self.page_table.long()[:, :, None] * self.page_size + offsets).flatten(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceAttentionBatch:
    """Who may see whom in a round that never asks the host: R requests of one root and N nodes.

    Row r * N + i is node i of request r, its own KV at cache position num_cached[r] + i. A node
    sees all cached positions, and of the nodes its ancestors and itself. Padding nodes' rows give
    0.

    num_cached   [R] int32: the root's position       num_nodes    [R] int32, root counted
    page_table   [R, P] int32                         mask         [R, N, W] int32 ancestor bits
    """

    num_cached: Tensor
    num_nodes: Tensor
    page_table: Tensor
    page_size: int
    mask: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftAttentionBatch:
    """What the blocks of R requests see, S slots each.

    Slot i stands at position end[r] + i. It sees the positions before end[r], whose K and V are in
    the cache, and the block's own slots, which are not.

    end          [R] int32: positions of context, up to P * page_size
    page_table   [R, P] int32, as in AttentionBatch; entries behind the context mean nothing
    causal       nothing behind its own position
    window       only positions nearer than `window`, its own included; None: all
    """

    end: Tensor
    page_table: Tensor
    page_size: int
    causal: bool
    window: int | None
