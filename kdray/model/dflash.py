"""The DFlash network: a few Qwen3 layers that draft a whole block at once.

Slot 0 of a block is the root, the others hold the mask token; the output of slot k predicts the
token at root position + k. What the layers know of the text are the target's features of every
token before the root: one projection and norm of them, whose keys and values each layer takes
directly. They never pass through the layers, so they are stored once and for all.

Source: DFlash, arXiv 2602.06036, and the checkpoints of z-lab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kdray.kernels.attention_batch import DraftAttentionBatch
from kdray.kernels.ops import Ops
from kdray.model.dflash_config import DFlashConfig
from kdray.model.draft_rope import DraftRope, Rotation
from kdray.model.layers import RmsNorm


class DraftMLP(Protocol):
    """A layer's SwiGLU, its weights kept in one way or another."""

    def added(self, ops: Ops, x: Tensor, normed: Tensor) -> Tensor:
        """x [.., E] + what the MLP makes of normed [.., E]."""
        ...


class WholeDraftMLP(NamedTuple):
    """gate_up [E, 2 I], gate columns first; down [I, E]"""

    gate_up: Tensor
    down: Tensor

    def added(self, ops: Ops, x: Tensor, normed: Tensor) -> Tensor:
        inner = ops.gated_linear(normed.flatten(0, -2), self.gate_up)
        return ops.linear(inner, self.down, add=x.flatten(0, -2)).view(x.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftLayer:
    """One layer's weights, [in, out]; E width, H query heads, G key heads, D head dim.

    input_norm, post_norm over E; qkv [E, (H + 2 G) D], q before k before v; head_norm over
    [H + G, D], the q norm for every query head, then the k norm; key_norm, its last G rows;
    out [H D, E]
    """

    input_norm: RmsNorm
    qkv: Tensor
    head_norm: RmsNorm
    key_norm: RmsNorm
    out: Tensor
    post_norm: RmsNorm
    mlp: DraftMLP


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftWeights:
    """fc [F, E], hidden_norm and norm over E, and the layers."""

    fc: Tensor
    hidden_norm: RmsNorm
    layers: tuple[DraftLayer, ...]
    norm: RmsNorm


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerContext:
    """What one layer's blocks look back at: cache [slots, 2, G, D], keys before values, and which
    of it is whose."""

    cache: Tensor
    batch: DraftAttentionBatch


class DFlashNetwork:
    """The network's two uses: context K/V of committed tokens, and the hidden states of a block."""

    def __init__(self, config: DFlashConfig, weights: DraftWeights, ops: Ops) -> None:
        self.config = config
        self.weights = weights
        self._ops = ops
        self._rope = DraftRope(config.head_dim, config.rope_theta, config.yarn, weights.fc.device)

    def context_kv(self, features: Tensor, position: Tensor) -> list[Tensor]:
        """Features [M, F] of tokens at position [M] -> per layer their K and V [M, 2, G, D]."""
        weights, ops = self.weights, self._ops
        known = ops.rms_norm(ops.linear(features, weights.fc), weights.hidden_norm)
        turn = self._rope.at(position)
        return [self._context_kv_of(layer, known, turn) for layer in weights.layers]

    def draft(self, block: Tensor, position: Tensor, contexts: Sequence[LayerContext]) -> Tensor:
        """Embedded blocks [R, S, E] at position [R, S] -> what the head reads, [R, S - 1, E]."""
        turn, rms_norm = self._rope.at(position), self._ops.rms_norm
        x = block.flatten(0, 1)
        for layer, context in zip(self.weights.layers, contexts, strict=True):
            mixed = self._attend(layer, rms_norm(x, layer.input_norm), turn, context)
            x = self._ops.linear(mixed, layer.out, add=x)
            x = layer.mlp.added(self._ops, x, rms_norm(x, layer.post_norm))
        return self.weights.norm(x.view(block.shape)[:, 1:])

    def _context_kv_of(self, layer: DraftLayer, known: Tensor, turn: Rotation) -> Tensor:
        config = self.config
        heads, groups, dim = config.num_heads, config.num_kv_heads, config.head_dim
        kv = self._ops.linear(known, layer.qkv[:, heads * dim :]).view(-1, 2, groups, dim)
        key = turn.apply(layer.key_norm(kv[:, 0]))
        return torch.stack((key, kv[:, 1]), dim=1)

    def _attend(
        self, layer: DraftLayer, x: Tensor, turn: Rotation, context: LayerContext
    ) -> Tensor:
        """Blocks x [R * S, E] -> [R * S, H D]; keys are the context's and the block's own."""
        config = self.config
        heads, groups, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = self._ops.linear(x, layer.qkv).view(-1, config.block_size, heads + 2 * groups, dim)
        turned = turn.apply(layer.head_norm(qkv[:, :, : heads + groups]))
        own = torch.stack((turned[:, :, heads:], qkv[:, :, heads + groups :]), dim=2)
        mixed = self._ops.draft_attention(
            turned[:, :, :heads], own, context.cache, context.batch, dim**-0.5
        )
        return mixed.reshape(len(x), heads * dim)
