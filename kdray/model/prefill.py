"""A long prompt chunk's attention, block of keys by block: parts of a softmax and how they merge.

A state is the attention over some of the keys with the log-sum-exp of its scores; two states of the
same rows over different keys make the state over all of them (arXiv 2501.01005, section 2.2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionState(NamedTuple):
    """mixed [H, t, V] values, lse [H, t, 1] natural log-sum-exp of the scaled scores; both fp32."""

    mixed: Tensor
    lse: Tensor


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> AttentionState:
    """query [H, t, D], key [H, b, D], value [H, b, V] -> the state of t rows over b keys.

    causal   b = t, and row i sees keys 0 .. i; else every row sees every key
    """
    if query.is_cuda and query.dtype != torch.float32:
        return _attend_fused(query, key, value, scale, causal=causal)
    score = torch.bmm(query.float(), key.float().transpose(1, 2)).mul_(scale)
    if causal:
        hidden = torch.ones(score.shape[1:], dtype=torch.bool, device=score.device).triu_(1)
        score.masked_fill_(hidden, -torch.inf)
    lse = score.logsumexp(-1, keepdim=True)
    return AttentionState(torch.bmm(score.sub_(lse).exp_(), value.float()), lse)


def merge_states(one: AttentionState, other: AttentionState) -> AttentionState:
    lse = torch.logaddexp(one.lse, other.lse)
    mixed = one.mixed * (one.lse - lse).exp_() + other.mixed * (other.lse - lse).exp_()
    return AttentionState(mixed, lse)


def _attend_fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> AttentionState:
    """The same by torch's memory-efficient kernel, which never holds the scores.

    It takes keys wider than values, on every GPU served, and gives the log-sum-exp, in rows padded
    to a multiple of 32.
    """
    mixed, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query[None], key[None], value[None], None, True, 0.0, causal, scale=scale
    )
    return AttentionState(mixed[0].float(), lse[0, :, : query.shape[1], None])
