"""Tree attention over the paged latent cache as dense matrix products.

The rows of a batch are cut into tiles: short requests (decoding) side by side, padded to the
longest of them; a long one (a prompt chunk) by itself, some rows at a time. A tile says which rows
it holds, which slots their keys lie in, and who sees whom; it serves every layer of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.tree import WORD_BITS, mask_to_bool
from kdray.kernels.attention_batch import AttentionBatch, DeviceAttentionBatch
from kdray.kernels.attention_rows import AttentionRows
from kdray.kernels.latent_rows import gathered

TILE_ROWS = 256  # rows of a long request attended at once
SHORT_ROWS = 64  # requests of at most this many rows share a tile
SPARE_KEYS = 256  # keys a request may be padded by before it gets a tile of shorter ones


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTile:
    """G requests by M rows by S keys, padded.

    slots   [G * S] int64: cache slots of the keys; padding repeats the first, which is written
    bias    [G, M, 1, S] float32: 0 where the row sees the key, else -inf; None: all see all
    shape   G, M, S
    rows    [G * M] int64: rows of the batch; padding repeats a row of the same request. None: the
            tile is the whole batch as it lies, without padding
    own     [n] int64: the places among G * M that are no padding; None with rows
    """

    slots: Tensor
    bias: Tensor | None
    shape: tuple[int, int, int]
    rows: Tensor | None
    own: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Rows first .. last of request r, and the S keys the last of them can see at most."""

    r: int
    first: int
    last: int
    num_keys: int

    @property
    def num_rows(self) -> int:
        return self.last - self.first


def attend(
    query: Tensor, cache: Tensor, tile: AttentionTile, scale: float, latent_dim: int
) -> Tensor:
    """Attention of the tile's rows [G * M, H, C]; query [T, H, C + D] of the batch (ops.py)."""
    groups, rows, keys = tile.shape
    heads = query.shape[1]
    if tile.rows is not None:
        query = query.index_select(0, tile.rows)
    q = query.float().reshape(groups, rows * heads, -1)
    key = gathered(cache, tile.slots, latent_dim, query.shape[2] - latent_dim).float()
    key = key.view(groups, keys, -1)
    scores = torch.bmm(q, key.transpose(1, 2)).mul_(scale)
    if tile.bias is not None:
        scores.view(groups, rows, heads, keys).add_(tile.bias)
    mixed = torch.bmm(scores.softmax(dim=-1), key[..., :latent_dim])
    return mixed.view(groups * rows, heads, latent_dim).to(query.dtype)


def scatter(mixed: Tensor, tile: AttentionTile, out: Tensor) -> None:
    """The tile's own rows of attend(), written to their places in out [T, H, C]."""
    assert tile.rows is not None and tile.own is not None, "a whole batch needs no scatter"
    out[tile.rows.index_select(0, tile.own)] = mixed.index_select(0, tile.own)


def tile_batch(batch: AttentionBatch) -> list[AttentionTile]:
    """Every row of the batch in exactly one tile."""
    if batch.row_start == (0, 1):
        return [_single_row(batch)]
    bits = mask_to_bool(batch.mask.cpu().numpy(), batch.mask.shape[1])
    return [_tile(spans, batch, bits) for spans in _groups(batch)]


def _single_row(batch: AttentionBatch) -> AttentionTile:
    """Plain decoding of one request: its row sees all keys."""
    num_keys = next(_spans(batch, 0, 1)).num_keys
    slots = batch.slots[0, :num_keys]
    return AttentionTile(slots=slots, bias=None, shape=(1, 1, num_keys), rows=None, own=None)


def _groups(batch: AttentionBatch) -> Iterator[list[_Span]]:
    """Spans that share a tile."""
    short: list[_Span] = []
    for r, (start, stop) in enumerate(zip(batch.row_start, batch.row_start[1:], strict=False)):
        spans = list(_spans(batch, r, stop - start))
        if stop - start <= SHORT_ROWS:
            short += spans
        else:
            yield from ([span] for span in spans)
    group: list[_Span] = []
    for span in sorted(short, key=lambda span: span.num_keys):
        if group and span.num_keys > 2 * group[0].num_keys + SPARE_KEYS:
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _spans(batch: AttentionBatch, r: int, num_rows: int) -> Iterator[_Span]:
    for first in range(0, num_rows, TILE_ROWS):
        last = min(first + TILE_ROWS, num_rows)
        num_keys = batch.num_cached[r] + last
        if num_keys > batch.page_table.shape[1] * batch.page_size:
            raise ValueError(
                f"request {r} reaches position {num_keys - 1}, beyond its page table; "
                "reserve pages for known tokens and drafts before the step"
            )
        yield _Span(r=r, first=first, last=last, num_keys=num_keys)


def _tile(spans: Sequence[_Span], batch: AttentionBatch, bits: NDArray[np.bool_]) -> AttentionTile:
    num_rows = max(span.num_rows for span in spans)
    num_keys = max(span.num_keys for span in spans)
    seen = np.stack([_seen(span, batch, bits, num_rows, num_keys) for span in spans])
    device = batch.page_table.device
    bias = None
    if not seen.all():
        hidden = np.where(seen, np.float32(0.0), np.float32(-np.inf))[:, :, None]
        bias = torch.from_numpy(hidden).to(device)
    rows = np.concatenate([_rows(span, batch, num_rows) for span in spans])
    in_order = len(rows) == batch.row_start[-1] and (np.diff(rows) == 1).all()
    own = np.arange(num_rows) < np.array([span.num_rows for span in spans])[:, None]
    return AttentionTile(
        slots=_slots(spans, batch, num_keys),
        bias=bias,
        shape=(len(spans), num_rows, num_keys),
        rows=None if in_order else torch.from_numpy(rows).to(device),
        own=None if in_order else torch.from_numpy(np.flatnonzero(own)).to(device),
    )


def _rows(span: _Span, batch: AttentionBatch, num_rows: int) -> NDArray[np.int64]:
    row = np.minimum(span.first + np.arange(num_rows), span.last - 1)
    return batch.row_start[span.r] + row


def _seen(
    span: _Span, batch: AttentionBatch, bits: NDArray[np.bool_], num_rows: int, num_keys: int
) -> NDArray[np.bool_]:
    """[num_rows, num_keys]: known tokens in order, then of the drafts the ancestors and itself."""
    root = batch.num_known[span.r] - 1
    row = span.first + np.arange(num_rows)[:, None]
    key = np.arange(num_keys) - batch.num_cached[span.r]  # the row whose KV it is; < 0: cached
    seen = key <= row  # right for known rows; drafts among themselves follow the mask instead
    first_draft = max(span.first, root + 1)
    if first_draft < span.last:
        nodes = slice(first_draft - root, span.last - root)
        drafts = slice(batch.num_cached[span.r] + root + 1, span.num_keys)
        rows = slice(first_draft - span.first, span.num_rows)
        seen[rows, drafts] = bits[span.r, nodes, 1 : span.last - root]
    return seen


def _slots(spans: Sequence[_Span], batch: AttentionBatch, num_keys: int) -> Tensor:
    if len(spans) == 1:
        return batch.slots[spans[0].r, :num_keys].contiguous()
    device = batch.page_table.device
    which = torch.tensor([span.r for span in spans], device=device)
    counts = torch.tensor([span.num_keys for span in spans], device=device)
    slots = batch.slots[which, :num_keys]
    written = torch.arange(num_keys, device=device) < counts[:, None]
    return torch.where(written, slots, slots[:, :1]).flatten()


def attend_on_device(
    query: Tensor, cache: Tensor, batch: DeviceAttentionBatch, scale: float, latent_dim: int
) -> Tensor:
    """query [R * N, H, C + D] -> [R * N, H, C]; reads every position of the page tables, but on a
    CPU, which knows how many there are, only the pages that the longest request has."""
    requests, nodes, _ = batch.mask.shape
    pages = batch.page_table
    if pages.device.type == "cpu":
        longest = int(batch.num_cached.max()) + nodes
        pages = pages[:, : -(-longest // batch.page_size)]
    offset = torch.arange(batch.page_size, device=cache.device)
    slots = (pages.long()[:, :, None] * batch.page_size + offset).flatten(1)
    key = gathered(cache, slots.flatten(), latent_dim, query.shape[2] - latent_dim).float()
    key = key.view(*slots.shape, -1)
    q = query.float().view(requests, nodes, *query.shape[1:])
    scores = torch.einsum("rnhd,rsd->rnhs", q, key) * scale
    seen = _seen_on_device(batch, slots.shape[1])
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    mixed = torch.einsum("rnhs,rsc->rnhc", scores.softmax(dim=-1), key[..., :latent_dim])
    real = torch.arange(nodes, device=cache.device) < batch.num_nodes[:, None]
    mixed = mixed.masked_fill(~real[:, :, None, None], 0.0)
    return mixed.flatten(0, 1).to(query.dtype)


def _seen_on_device(batch: DeviceAttentionBatch, num_keys: int) -> Tensor:
    """[R, N, S] bool: everything cached, then the nodes that the mask names."""
    _, nodes, _ = batch.mask.shape
    bit = torch.arange(nodes, device=batch.mask.device)
    named = (batch.mask[:, :, bit // WORD_BITS] >> (bit % WORD_BITS)) & 1
    relative = torch.arange(num_keys, device=batch.mask.device) - batch.num_cached[:, None]
    place = relative.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1)
    is_node = ((relative >= 0) & (relative < nodes))[:, None]
    return (relative < 0)[:, None] | (is_node & named.bool().gather(2, place))


def planned_rows(batch: AttentionRows) -> tuple[Tensor, AttentionBatch]:
    """The rows that are real, [t] int64, and the batch of them alone, as the host has it."""
    device = batch.page_table.device
    numbers = (batch.row_start, batch.num_cached, batch.num_known, batch.num_nodes)
    starts, cached, known, nodes = (number.cpu().numpy() for number in numbers)
    there = np.flatnonzero(known)
    counts = (known + nodes - 1)[there]
    rows = [start + np.arange(count) for start, count in zip(starts[there], counts, strict=True)]
    own = torch.from_numpy(there).to(device)
    on_host = AttentionBatch(
        row_start=(0, *np.cumsum(counts).tolist()),
        num_cached=tuple(cached[there].tolist()),
        num_known=tuple(known[there].tolist()),
        page_table=batch.page_table[own],
        page_size=batch.page_size,
        mask=batch.mask[own],
    )
    return torch.from_numpy(np.concatenate([[], *rows]).astype(np.int64)).to(device), on_host
