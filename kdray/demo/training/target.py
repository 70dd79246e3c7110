"""The demo target as a torch module for training: static shapes, no data-dependent control."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdray.demo.training.layers import GatedMLP, Linear, RMSNorm, initialise
from kdray.demo.training.rope import rotate_interleaved, softmax_scale, yarn_frequencies
from kdray.demo.training.shapes import TargetShape


@dataclass(frozen=True)
class TargetOutput:
    """logits [B, S, V]; features: the residual stream after each layer, [B, S, hidden] each."""

    logits: Tensor
    features: tuple[Tensor, ...]


class LatentAttention(nn.Module):
    """MLA. ``forward`` expands the latent, ``decode`` absorbs it into the query."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.scale = softmax_scale(shape)
        self.q_a_proj = Linear(shape.hidden, shape.q_rank)
        self.q_a_layernorm = RMSNorm(shape.q_rank, shape.eps)
        self.q_b_proj = Linear(shape.q_rank, shape.heads * shape.query)
        self.kv_a_proj_with_mqa = Linear(shape.hidden, shape.kv_rank + shape.rope)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, shape.eps)
        self.kv_b_proj = Linear(shape.kv_rank, shape.heads * (shape.nope + shape.value))
        self.o_proj = Linear(shape.heads * shape.value, shape.hidden)

    def project(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, S, hidden] -> q_nope and q_rope [B, S, H, .], latent [B, S, C], k_rope."""
        shape = self.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = q.unflatten(-1, (shape.heads, shape.query)).split(
            [shape.nope, shape.rope], dim=-1
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([shape.kv_rank, shape.rope], dim=-1)
        q_rope = rotate_interleaved(q_rope, angles[:, None])
        return q_nope, q_rope, self.kv_a_layernorm(latent), rotate_interleaved(k_rope, angles)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, S, hidden], angles [S, rope / 2], mask additive [B, 1, S, S] or None for causal."""
        shape = self.shape
        q_nope, q_rope, latent, k_rope = self.project(x, angles)
        expanded = self.kv_b_proj(latent).unflatten(-1, (shape.heads, shape.nope + shape.value))
        k_nope, v = expanded.split([shape.nope, shape.value], dim=-1)
        dtype = k_nope.dtype
        k_rope = k_rope.to(dtype)[:, :, None].expand(-1, -1, shape.heads, -1)
        q = torch.cat([q_nope, q_rope.to(dtype)], dim=-1).transpose(1, 2)
        k = torch.cat([k_nope, k_rope], dim=-1).transpose(1, 2)
        # The fused attention wants one width for keys and values.
        v = F.pad(v, (0, shape.query - shape.value)).transpose(1, 2)
        mask = None if mask is None else mask.to(dtype)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        result: Tensor = self.o_proj(out[..., : shape.value].transpose(1, 2).flatten(2))
        return result

    def decode(self, x: Tensor, angles: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        """One token a row. x [B, 1, hidden], cache [B, S, C + rope] written at ``position`` [1]."""
        shape = self.shape
        q_nope, q_rope, latent, k_rope = self.project(x, angles)
        cache.index_copy_(1, position, torch.cat([latent, k_rope], dim=-1).to(cache.dtype))
        up = self.kv_b_proj.weight.unflatten(0, (shape.heads, shape.nope + shape.value))
        q_latent = torch.einsum("bhn,hnc->bhc", q_nope[:, 0], up[:, : shape.nope])
        q = torch.cat([q_latent, q_rope[:, 0].to(q_latent.dtype)], dim=-1)
        scores = (q @ cache.transpose(1, 2)).float() * self.scale
        future = torch.arange(cache.shape[1], device=x.device) > position
        weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(cache.dtype)
        out = weights @ cache[..., : shape.kv_rank]
        value = torch.einsum("bhc,hvc->bhv", out, up[:, shape.nope :])
        result: Tensor = self.o_proj(value.flatten(1))[:, None]
        return result


class Router(nn.Module):
    """Sigmoid scores in fp32; the two best by score plus bias, weighted by score alone."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.experts))
        self.register_buffer("load", torch.zeros(shape.experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> fp32 weights [..., experts], zero where an expert is not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
            best = (scores + self.e_score_correction_bias.float()).topk(
                self.shape.experts_per_token
            )
            chosen = torch.zeros_like(scores).scatter(-1, best.indices, 1.0)
            if self.training:
                self.load.copy_(chosen.detach().flatten(0, -2).sum(0))
            weights = scores * chosen
            return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.shape.routed_scaling

    def balance(self, speed: float) -> None:
        """Move the bias towards the experts that the last forward used too little."""
        self.e_score_correction_bias.add_(speed * torch.sign(self.load.mean() - self.load))


class MixtureOfExperts(nn.Module):
    """All experts as one wide product; those not chosen have weight zero.

    The shared expert is the last one, always of weight one.
    """

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        count, width = shape.experts + 1, shape.expert_width
        self.gate = Router(shape)
        self.experts_gate = nn.Parameter(torch.empty(count * width, shape.hidden))
        self.experts_up = nn.Parameter(torch.empty(count * width, shape.hidden))
        self.experts_down = nn.Parameter(torch.empty(shape.hidden, count * width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        weights = F.pad(self.gate(x), (0, 1), value=1.0)
        x = x.to(self.experts_gate.dtype)
        inner = F.silu(F.linear(x, self.experts_gate)) * F.linear(x, self.experts_up)
        inner = inner.unflatten(-1, (self.shape.experts + 1, self.shape.expert_width))
        inner = (inner * weights[..., None].to(inner.dtype)).flatten(-2)
        return F.linear(inner, self.experts_down)


class TargetLayer(nn.Module):
    """One layer of the residual stream."""

    def __init__(self, shape: TargetShape, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = LatentAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp: nn.Module = (
            MixtureOfExperts(shape) if index > 0 else GatedMLP(shape.hidden, shape.dense_width)
        )

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None) -> Tensor:
        """The residual stream [B, S, hidden] after this layer."""
        return self._feed(x + self.self_attn(self.input_layernorm(x), angles, mask))

    def decode(self, x: Tensor, angles: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        """The same for one token a row, against a cache."""
        attended = self.self_attn.decode(self.input_layernorm(x), angles, cache, position)
        return self._feed(x + attended)

    def _feed(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DemoTarget(nn.Module):
    """The whole target. Parameter names follow the public checkpoints, experts apart."""

    frequencies: Tensor

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(TargetLayer(shape, i) for i in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = Linear(shape.hidden, shape.vocab)
        self.register_buffer("frequencies", yarn_frequencies(shape), persistent=False)
        initialise(self, shape.layers)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> TargetOutput:
        """tokens [B, S] int64, mask additive [B, 1, S, S] or None for causal."""
        angles = self.angles(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.embed_tokens(tokens).float()
        features = []
        for layer in self.layers:
            x = layer(x, angles, mask)
            features.append(x)
        return TargetOutput(self.lm_head(self.norm(x)), tuple(features))

    def decode(self, tokens: Tensor, position: Tensor, caches: list[Tensor]) -> Tensor:
        """tokens [B] at ``position`` [1] -> fp32 logits [B, V]; the caches gain one row each."""
        angles = self.angles(position)
        x = self.embed_tokens(tokens)[:, None].float()
        stack = [layer for layer in self.layers if isinstance(layer, TargetLayer)]
        for layer, cache in zip(stack, caches, strict=True):
            x = layer.decode(x, angles, cache, position)
        logits: Tensor = self.lm_head(self.norm(x[:, 0]))
        return logits.float()

    def angles(self, positions: Tensor) -> Tensor:
        """[S] -> fp32 [S, rope / 2]."""
        return positions.float()[:, None] * self.frequencies.float()

    def routers(self) -> list[Router]:
        """The routers of all expert layers."""
        return [module for module in self.modules() if isinstance(module, Router)]
