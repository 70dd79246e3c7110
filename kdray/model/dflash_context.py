"""What a block of draft slots sees: where its context stands in the cache, and the mask over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.plan import PlannedRequest
from kdray.model.dflash_config import DraftVisibility

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockContext:
    """Keys of R blocks of S slots: C context positions each (padded), then the block itself.

    slots    [R, C + S] int64 cache slots; those of padding and of the block point anywhere
    padding  [R, C] bool, or None where there is none
    visible  [R, 1, S, C + S] bool, or None where every key is seen
    """

    slots: Tensor
    padding: Tensor | None
    visible: Tensor | None

    def read(self, cache: Tensor) -> Tensor:
        """cache [slots, 2, G, D] -> keys and values [R, C + S, 2, G, D]; the last S mean nothing.

        The network puts the block's own there: room in the copy spares it another one. Padding
        reads as zero: an unwritten slot may hold NaN, which a mask would not stop.
        """
        rows = cache.index_select(0, self.slots.flatten()).view(*self.slots.shape, *cache.shape[1:])
        if self.padding is not None:
            context = rows[:, : self.padding.shape[1]]
            context.masked_fill_(self.padding[:, :, None, None, None], 0.0)
        return rows


def look_back(
    requests: Sequence[PlannedRequest],
    visibility: DraftVisibility,
    *,
    block_size: int,
    page_size: int,
    device: torch.device,
) -> BlockContext:
    """The context of each request's block, whose slot 0, the root, stands at num_cached.

    Only positions some slot can see are read: the last window - 1 where there is a window.
    """
    end = np.array([request.num_cached for request in requests], dtype=np.int64)
    start = np.zeros_like(end)
    if visibility.window is not None:
        start = np.maximum(end - (visibility.window - 1), 0)
    offset = np.arange(int((end - start).max()), dtype=np.int64)
    position = start[:, None] + offset
    padding = position >= end[:, None]
    visible = _visible(position, padding, end[:, None] + np.arange(block_size), visibility)
    slots = np.zeros((len(requests), len(offset) + block_size), dtype=np.int64)
    for row, request, wanted in zip(slots, requests, np.where(padding, 0, position), strict=True):
        row[: len(offset)] = slots_at(request, wanted, page_size)
    return BlockContext(
        slots=torch.from_numpy(slots).to(device),
        padding=torch.from_numpy(padding).to(device) if padding.any() else None,
        visible=None if visible.all() else torch.from_numpy(visible[:, None]).to(device),
    )


def look_back_on_device(
    root_position: Tensor,
    page_table: Tensor,
    visibility: DraftVisibility,
    *,
    block_size: int,
    page_size: int,
) -> BlockContext:
    """The same from device tensors alone, nothing waiting for the host: what a CUDA graph replays.

    root_position [R] int32 or int64, page_table [R, P] int32. All P * page_size positions, or the
    window's, are read whatever the lengths, so the shapes hold for every replay.
    """
    end = root_position.long()[:, None]
    length, start = page_table.shape[1] * page_size, torch.zeros_like(end)
    if visibility.window is not None:
        length = min(length, visibility.window - 1)
        start = (end - length).clamp(min=0)
    block = torch.arange(block_size, device=page_table.device)
    position = start + torch.arange(length, device=page_table.device)
    padding = position >= end
    wanted = position.masked_fill(padding, 0)
    page = page_table.long().gather(1, wanted // page_size)
    slots = torch.cat([page * page_size + wanted % page_size, torch.zeros_like(block + end)], dim=1)
    key = torch.cat([position, end + block], dim=1)[:, None, :]
    query = (end + block)[:, :, None]
    real = torch.cat([~padding, torch.ones_like(block + end, dtype=torch.bool)], dim=1)[:, None, :]
    visible = real.expand(-1, block_size, -1)
    if visibility.causal:
        visible = visible & (key <= query)
    if visibility.window is not None:
        visible = visible & ((query - key).abs() < visibility.window)
    return BlockContext(slots=slots, padding=padding, visible=visible[:, None])


def slots_at(request: PlannedRequest, position: Int64Array, page_size: int) -> Int64Array:
    """Cache slots of a request's positions, by its page table."""
    pages: Int64Array = request.pages[position // page_size].astype(np.int64)
    return pages * page_size + position % page_size


def _visible(
    context: Int64Array, padding: NDArray[np.bool_], block: Int64Array, rule: DraftVisibility
) -> NDArray[np.bool_]:
    """[R, S, C + S]: which keys each slot of the block sees."""
    key = np.concatenate([context, block], axis=1)[:, None, :]
    query = block[:, :, None]
    real = np.concatenate([~padding, np.ones_like(block, dtype=np.bool_)], axis=1)[:, None, :]
    visible = np.repeat(real, block.shape[1], axis=1)
    if rule.causal:
        visible &= key <= query
    if rule.window is not None:
        visible &= np.abs(query - key) < rule.window
    return visible
