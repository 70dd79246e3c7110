"""Multi-head latent attention in its two forms.

A token's cache row is [c | k_rope]: its normalised latent (C numbers) and its rotated key (D),
shared by all heads. Keys and values of head h are c W_UK[h] and c W_UV[h].

Absorbed: the query takes W_UK in, attention runs on the latents themselves (ops.verify_attention).
Expanded: the latents become keys and values per head; fewer FLOPs a pair, so it serves long prompt
chunks (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kdray.kernels.attention_batch import AttentionBatch
from kdray.kernels.attention_rows import AnyAttentionBatch
from kdray.kernels.latent_rows import gathered
from kdray.kernels.matmul import matmul
from kdray.kernels.ops import Ops
from kdray.kernels.page_tables import upload
from kdray.model.layers import RmsNorm
from kdray.model.prefill import attend_block, merge_states

# Known rows from which expanding the latents pays. FLOPs cross at C (N + V) / (2 C - N - V) rows,
# 171 for Kimi; measured with the demo's sizes on a CPU the two forms meet at about 256. (On an H200
# they do between 512 and 2,048; steps of up to 512 rows are passes there, which never expand.)
EXPAND_FROM_ROWS = 256
KEY_BLOCK = 1024  # cached keys expanded at a time, where scores are held
# Of all heads, where a kernel holds no scores: 40 MB of keys and values for Kimi's 8 heads a rank,
# so that few blocks have to be launched.
HEAD_KEYS_FUSED = 1 << 16
ROW_BLOCK = 128  # rows that attend at a time in the expanded form: they hold their scores
ROW_BLOCK_FUSED = 8192  # where a kernel holds none


class LongRows(NamedTuple):
    """Rows `rows` of the batch, consecutive positions of one text.

    num_cached  positions before the first of them
    slots       [num_cached + rows] int64: where their keys lie
    """

    rows: slice
    num_cached: int
    slots: Tensor


@dataclass(frozen=True, eq=False)
class AttentionSplit:
    """Which rows attend in which form; made once a step, used by every layer.

    absorbed        the requests of the absorbed form, None without any
    absorbed_rows   [t] int64 their rows in the batch, None where they are all rows
    """

    absorbed: AnyAttentionBatch | None
    absorbed_rows: Tensor | None
    expanded: tuple[LongRows, ...]

    @classmethod
    def of(cls, batch: AnyAttentionBatch, expand_from: int = EXPAND_FROM_ROWS) -> AttentionSplit:
        """Expand prompt chunks of `expand_from` rows or more; the rest stays absorbed."""
        if not isinstance(batch, AttentionBatch):
            return cls(batch, None, ())  # the host does not know of long ones
        starts = batch.row_start
        num_rows = [end - start for start, end in pairwise(starts)]
        is_long = [
            known >= expand_from and known == rows
            for known, rows in zip(batch.num_known, num_rows, strict=True)
        ]
        if not any(is_long):
            return cls(batch, None, ())
        expanded = tuple(
            piece for r, long in enumerate(is_long) if long for piece in _long_rows(batch, r)
        )
        short = [r for r, long in enumerate(is_long) if not long]
        if not short:
            return cls(None, None, expanded)
        device = batch.page_table.device
        rows = torch.cat([torch.arange(starts[r], starts[r + 1], device=device) for r in short])
        return cls(_subset(batch, short), rows, expanded)


def key_block(heads: int, *, on_gpu: bool) -> int:
    """Cached keys that so many heads attend to at a time."""
    return max(HEAD_KEYS_FUSED // heads, KEY_BLOCK) if on_gpu else KEY_BLOCK


def _long_rows(batch: AttentionBatch, request: int) -> Iterator[LongRows]:
    """A prompt chunk in pieces of some rows, which bounds what is held at a time."""
    size = ROW_BLOCK_FUSED if batch.page_table.is_cuda else ROW_BLOCK
    start, end = batch.row_start[request], batch.row_start[request + 1]
    cached = batch.num_cached[request]
    for first in range(start, end, size):
        last = min(first + size, end)
        yield LongRows(
            rows=slice(first, last),
            num_cached=cached + first - start,
            slots=batch.slots[request, : cached + last - start],
        )


def _subset(batch: AttentionBatch, requests: list[int]) -> AttentionBatch:
    """The batch of some requests alone, their rows packed."""
    row_start = [0]
    for r in requests:
        row_start.append(row_start[-1] + batch.row_start[r + 1] - batch.row_start[r])
    index = upload(np.array(requests, dtype=np.int64), batch.page_table.device)
    return AttentionBatch(
        row_start=tuple(row_start),
        num_cached=tuple(batch.num_cached[r] for r in requests),
        num_known=tuple(batch.num_known[r] for r in requests),
        page_table=batch.page_table[index],
        page_size=batch.page_size,
        mask=batch.mask[index],
    )


class Rows(NamedTuple):
    """What every layer needs to know of the rows; made once a step.

    turns   [T, D / 2] complex64 rotations (rope.py)
    slot    [T] int64 cache slot of each row
    """

    turns: Tensor
    slot: Tensor
    split: AttentionSplit


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """One layer's attention, this rank's H heads.

    down          [E, Q + C + D] to the queries' latent (or the queries), the latent, the key
    query_norm    over Q, and query_up [Q, H (N + D)]; both None where queries have no latent
    latent_norm   over C
    key_up        [H, N, C] W_UK of each head
    value_up      [H, C, V] W_UV of each head
    output        [H V, E]
    """

    ops: Ops
    down: Tensor
    query_norm: RmsNorm | None
    query_up: Tensor | None
    latent_norm: RmsNorm
    key_up: Tensor
    value_up: Tensor
    output: Tensor
    scale: float

    def partial(self, x: Tensor, rows: Rows, cache: Tensor) -> Tensor:
        """x [T, E] -> [T, E], this rank's share; the rows' KV is written to cache [S, ..]."""
        num_heads, nope, latent_dim = self.key_up.shape
        kv_width = latent_dim + 2 * rows.turns.shape[1]
        hidden, kv = self.ops.linear(x, self.down).split_with_sizes(
            [self.down.shape[1] - kv_width, kv_width], dim=-1
        )
        if self.query_up is not None and self.query_norm is not None:
            hidden = self.ops.norm_linear(hidden, self.query_norm, self.query_up)
        query = hidden.view(x.shape[0], num_heads, -1)
        split, norm = rows.split, self.latent_norm
        if split.absorbed is not None and split.absorbed_rows is None:
            absorbed = self.ops.absorb_query(query, kv, cache, rows, norm, self.key_up)
            heads = self._mixed(absorbed, cache, split.absorbed)
        else:
            turned = self.ops.rope_cache(query, kv, cache, rows, norm)
            heads = self._attend(query[..., :nope], turned, cache, split)
        return self.ops.linear(heads.flatten(1), self.output)

    def _attend(self, nope: Tensor, turned: Tensor, cache: Tensor, split: AttentionSplit) -> Tensor:
        """nope [T, H, N], turned [T, H, C + D] as rope_cache leaves it -> values [T, H, V], each
        row in its form, where some are expanded."""
        heads = nope.new_empty(*nope.shape[:2], self.value_up.shape[2])
        if split.absorbed is not None:
            rows = split.absorbed_rows
            heads[rows] = self._absorbed(nope[rows], turned[rows], cache, split.absorbed)
        rotated = turned[..., self.key_up.shape[2] :]
        for long in split.expanded:
            query = torch.cat([nope[long.rows], rotated[long.rows]], dim=-1)
            heads[long.rows] = self._expanded(query, cache, long)
        return heads

    def _absorbed(
        self,
        nope: Tensor,
        query: Tensor,
        cache: Tensor,
        batch: AnyAttentionBatch,
    ) -> Tensor:
        """query [T, H, C + D] brings its rotated part; its latent part is made here."""
        latent_dim = self.key_up.shape[2]
        self.ops.per_head(nope, self.key_up, out=query[..., :latent_dim])
        return self._mixed(query, cache, batch)

    def _mixed(self, query: Tensor, cache: Tensor, batch: AnyAttentionBatch) -> Tensor:
        """query [T, H, C + D], absorbed -> values [T, H, V]."""
        latent_dim = self.key_up.shape[2]
        mixed = self.ops.verify_attention(query, cache, batch, self.scale, latent_dim)
        return self.ops.per_head(mixed, self.value_up)

    def _expanded(self, query: Tensor, cache: Tensor, long: LongRows) -> Tensor:
        """query [t, H, N + D] -> [t, H, V]: what was cached block by block, then the rows' own."""
        query, cached = query.transpose(0, 1), long.num_cached
        _, nope, latent_dim = self.key_up.shape
        rope_dim = query.shape[2] - nope
        starts = [*range(0, cached, key_block(len(query), on_gpu=query.is_cuda)), cached]
        state = None
        for start, end in pairwise([*starts, cached + query.shape[1]]):
            kept = gathered(cache, long.slots[start:end], latent_dim, rope_dim)
            key, value = self._expand(kept.to(self.key_up.dtype))
            block = attend_block(query, key, value, self.scale, causal=start == cached)
            state = block if state is None else merge_states(state, block)
        assert state is not None, "a chunk has rows"
        return state.mixed.to(self.key_up.dtype).transpose(0, 1)

    def _expand(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Cache rows [b, C + D] -> keys [H, b, N + D] and values [H, b, V]."""
        num_heads, _, latent_dim = self.key_up.shape
        latent, key = kept[:, :latent_dim], kept[:, latent_dim:]
        nope = matmul(latent, self.key_up.transpose(1, 2))
        shared = key.expand(num_heads, -1, -1)
        return torch.cat([nope, shared], dim=-1), matmul(latent, self.value_up)
