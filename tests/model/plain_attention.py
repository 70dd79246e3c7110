"""verify_attention written row by row from its docstring; slow and obvious."""

from __future__ import annotations

import torch
from torch import Tensor

from kdray.kernels.attention_batch import AttentionBatch
from kdray.kernels.reference import ReferenceOps


class PlainAttention(ReferenceOps):
    """The reference ops with attention of its own."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def verify_attention(
        self, query: Tensor, cache: Tensor, batch: AttentionBatch, scale: float, latent_dim: int
    ) -> Tensor:
        out = query.new_empty(*query.shape[:2], latent_dim)
        for r, (cached, known) in enumerate(zip(batch.num_cached, batch.num_known, strict=True)):
            start, end = batch.row_start[r], batch.row_start[r + 1]
            for i in range(end - start):
                keys = cache[batch.slots[r, _visible(batch, r, cached, known, i)]]
                score = (query[start + i] @ keys.T).float() * scale
                weight = torch.softmax(score, dim=-1).to(keys.dtype)
                out[start + i] = weight @ keys[:, :latent_dim]
        return out


def _visible(batch: AttentionBatch, r: int, cached: int, known: int, row: int) -> list[int]:
    """Cache positions that row `row` of request r sees."""
    if row < known:
        return list(range(cached + row + 1))
    node = row - known + 1
    words = batch.mask[r, node].tolist()
    drafts = [j for j in range(1, node + 1) if words[j // 32] >> (j % 32) & 1]
    return [*range(cached + known), *(cached + known + j - 1 for j in drafts)]
