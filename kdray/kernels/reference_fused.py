"""The small ops of a layer in torch, for any device: clear, and the oracle of the fused kernels.

Each is the arithmetic that defines the op, down to what is rounded when. Equal inputs may still
differ in their last bits between devices, whose sums and exponentials do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kdray.kernels.latent_rows import is_fp8, quantised
from kdray.kernels.matmul import matmul
from kdray.kernels.ops import LiveRows, Norm, PlacedRows, RoutingRule


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x [.., E] / sqrt(mean(x^2) + eps) * weight over the last dimension, statistics in fp32.

    The normalised x is rounded to its own dtype before the weight, as the family was trained.
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(norm.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).to(x.dtype) * norm.weight


def add_rms_norm(x: Tensor, delta: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """x + delta, and the norm of that."""
    total = x + delta
    return total, rms_norm(total, norm)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """x [.., D] by turns [.., D / 2] (broadcast) -> same shape and dtype, rounded once."""
    pairs = torch.view_as_complex(torch.unflatten(x.float(), -1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def rope_cache(query: Tensor, kv: Tensor, cache: Tensor, rows: PlacedRows, norm: Norm) -> Tensor:
    """As in Ops."""
    latent_dim = norm.weight.shape[0]
    key_dim = kv.shape[1] - latent_dim
    latent, key = kv.split_with_sizes([latent_dim, key_dim], dim=-1)
    latent, key = rms_norm(latent, norm), rotate(key, rows.turns)
    if is_fp8(cache):
        row = quantised(latent, key)
    else:
        row = torch.cat([latent, key], dim=-1).to(cache.dtype)
    cache.index_copy_(0, rows.slot, row)
    absorbed = query.new_empty(*query.shape[:2], latent_dim + key_dim)
    _, rotated = absorbed.split_with_sizes([latent_dim, key_dim], dim=-1)
    rotated.copy_(rotate(query[..., -key_dim:], rows.turns[:, None]))
    return absorbed


def absorb_query(
    query: Tensor, kv: Tensor, cache: Tensor, rows: PlacedRows, norm: Norm, key_up: Tensor
) -> Tensor:
    """As in Ops."""
    _, nope, latent_dim = key_up.shape
    absorbed = rope_cache(query, kv, cache, rows, norm)
    per_head(query[..., :nope], key_up, out=absorbed[..., :latent_dim])
    return absorbed


def per_head(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """As in Ops."""
    product = matmul(x.transpose(0, 1), weight).transpose(0, 1)
    return product if out is None else out.copy_(product)


def swiglu(gate_up: Tensor) -> Tensor:
    """[.., 2 I], gate then up -> silu(gate) * up [.., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def route_experts(
    logits: Tensor, bias: Tensor, rule: RoutingRule, live: LiveRows | None = None
) -> tuple[Tensor, Tensor]:
    """As in Ops; the bias steers the choice, never the weight."""
    score = torch.sigmoid(logits)
    choice = score + bias
    if rule.num_groups > 1:
        choice = _within_best_groups(choice, rule)
    expert = _best(choice, rule.top_k)
    weight = score.gather(1, expert)
    if rule.normalize:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    weight = weight * rule.scale
    if live is None:
        return expert, weight
    node = torch.arange(live.nodes, device=logits.device)
    there = (node < live.num_nodes[:, None]) & (live.slot >= 0)[:, None]
    padding = ~there.view(-1, 1)
    return expert.masked_fill(padding, -1), weight.masked_fill(padding, 0.0)


def _within_best_groups(choice: Tensor, rule: RoutingRule) -> Tensor:
    """Keep the groups whose two best experts sum highest; the others get -inf.

    Not 0: with a negative bias 0 would beat experts of the chosen groups.
    """
    grouped = torch.unflatten(choice, 1, (rule.num_groups, -1))
    group_score = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(group_score, dtype=torch.bool)
    kept.scatter_(1, _best(group_score, rule.top_groups), True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def _best(score: Tensor, k: int) -> Tensor:
    """Indices [T, k] of the largest, the lower index first among equals (topk promises none)."""
    return score.sort(dim=1, descending=True, stable=True).indices[:, :k]
