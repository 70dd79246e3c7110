"""A drafter's blocks over their paged context in torch: the context gathered, the block behind it.

Where the context stands and who sees what is laid out once a batch and serves every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kdray.kernels.attention_batch import DraftAttentionBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockView:
    """Keys of R blocks of S slots: C context positions each (padded), then the block itself.

    slots    [R, C + S] int64 cache slots; those of padding and of the block point anywhere
    padding  [R, C] bool, or None where there is none
    visible  [R, 1, S, C + S] bool, or None where every key is seen
    """

    slots: Tensor
    padding: Tensor | None
    visible: Tensor | None

    @classmethod
    def of(cls, batch: DraftAttentionBatch, block_size: int) -> BlockView:
        """On the CPU as narrow as the batch allows; elsewhere nothing is asked of the device, and
        the whole page table, or the window, is looked at: shapes that hold for every replay."""
        on_host = batch.end.device.type == "cpu"
        end = batch.end.long()[:, None]
        length, start = _context(batch, end, on_host)
        device = end.device
        block = end + torch.arange(block_size, device=device)
        position = start + torch.arange(length, device=device)
        padding = position >= end
        visible = _visible(position, padding, block, batch)
        all_real = on_host and not bool(padding.any())
        all_seen = on_host and bool(visible.all())
        return cls(
            slots=_slots(position, padding, block_size, batch),
            padding=None if all_real else padding,
            visible=None if all_seen else visible[:, None],
        )

    def read(self, cache: Tensor) -> Tensor:
        """cache [.., 2, G, D] -> keys and values [R, C + S, 2, G, D]; the last S mean nothing.

        Room for the block's own spares another copy. Padding reads as zero: an unwritten slot may
        hold NaN, which a mask would not stop.
        """
        rows = cache.index_select(0, self.slots.flatten()).view(*self.slots.shape, *cache.shape[1:])
        if self.padding is not None:
            context = rows[:, : self.padding.shape[1]]
            context.masked_fill_(self.padding[:, :, None, None, None], 0.0)
        return rows


def attend_blocks(
    query: Tensor, own: Tensor, cache: Tensor, view: BlockView, scale: float
) -> Tensor:
    """Ops.draft_attention of a batch that has been laid out."""
    slots = query.shape[1]
    rows = view.read(cache)
    rows[:, -slots:] = own
    key, value = rows.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key,
        value,
        attn_mask=view.visible,
        scale=scale,
        enable_gqa=own.shape[3] < query.shape[2],
    )
    return mixed.transpose(1, 2)


def _context(batch: DraftAttentionBatch, end: Tensor, on_host: bool) -> tuple[int, Tensor]:
    """Positions that are looked at of each request, and the first [R, 1] of them."""
    start = torch.zeros_like(end)
    if batch.window is not None:
        start = (end - (batch.window - 1)).clamp(min=0)
    if on_host:
        return int((end - start).max()) if len(end) else 0, start
    reach = batch.page_table.shape[1] * batch.page_size
    return reach if batch.window is None else min(reach, batch.window - 1), start


def _slots(
    position: Tensor, padding: Tensor, block_size: int, batch: DraftAttentionBatch
) -> Tensor:
    """Cache slots of positions [R, C], and of padding and the block the first there is."""
    within = position.masked_fill(padding, 0)
    page = batch.page_table.long().gather(1, within // batch.page_size)
    slots = page * batch.page_size + within % batch.page_size
    return F.pad(slots.masked_fill_(padding, 0), (0, block_size))


def _visible(context: Tensor, padding: Tensor, block: Tensor, batch: DraftAttentionBatch) -> Tensor:
    """[R, S, C + S]: which keys each slot of the block sees."""
    key, query = torch.cat([context, block], dim=1)[:, None, :], block[:, :, None]
    real = torch.cat([~padding, torch.ones_like(block, dtype=torch.bool)], dim=1)[:, None, :]
    visible = real.expand(-1, block.shape[1], -1)
    if batch.causal:
        visible = visible & (key <= query)
    if batch.window is not None:
        visible = visible & ((query - key).abs() < batch.window)
    return visible
