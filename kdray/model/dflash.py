"""The DFlash network: a few Qwen3 layers that draft a whole block at once.

Slot 0 of a block is the root, the others hold the mask token; the output of slot k predicts the
token at root position + k. What the layers know of the text are the target's features of every
token before the root: one projection and norm of them, whose keys and values each layer takes
directly. They never pass through the layers, so they are stored once and for all.

Ranks share its heads and its MLPs as they share the target's: each has a part of every layer, and
sums over the ranks join them. One rank alone is the same network.

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
from kdray.model.parallel import Collectives, Shard, SoloCollectives


class DraftMLP(Protocol):
    """A layer's SwiGLU, or a rank's part of it, its weights kept in one way or another."""

    def partial(self, ops: Ops, normed: Tensor) -> Tensor:
        """What the MLP makes of normed [T, E]; of a rank's part, summed over the ranks."""
        ...


class WholeDraftMLP(NamedTuple):
    """gate_up [E, 2 I], gate columns first; down [I, E]"""

    gate_up: Tensor
    down: Tensor

    def partial(self, ops: Ops, normed: Tensor) -> Tensor:
        return ops.linear(ops.gated_linear(normed, self.gate_up), self.down)


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftLayer:
    """One layer's weights, [in, out]; E width, H query heads, G key heads (a rank's), D head dim.

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
    """fc [F, E] (of a rank's features), hidden_norm and norm over E, and the layers."""

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
    """The network's two uses: context K/V of committed tokens, and the hidden states of a block.

    Of several ranks each has its own heads' K/V, and all get the same hidden states; they make the
    same calls in the same order.
    """

    def __init__(
        self,
        config: DFlashConfig,
        weights: DraftWeights,
        ops: Ops,
        shard: Shard = Shard(),  # noqa: B008 (frozen)
        collectives: Collectives | None = None,
    ) -> None:
        """config: a rank's (of_rank), as its weights."""
        self.config = config
        self.weights = weights
        self.collectives = SoloCollectives() if collectives is None else collectives
        self._ops = ops
        self._features = shard.slice_of(config.feature_size)
        self._rope = DraftRope(config.head_dim, config.rope_theta, config.yarn, weights.fc.device)

    def context_kv(self, features: Tensor, position: Tensor) -> list[Tensor]:
        """Features [M, F] of tokens at position [M] -> per layer their K and V [M, 2, G, D]."""
        weights, ops = self.weights, self._ops
        joined = self.collectives.all_reduce(ops.linear(features[:, self._features], weights.fc))
        known = ops.rms_norm(joined, weights.hidden_norm)
        turn = self._rope.at(position)
        return [self._context_kv_of(layer, known, turn) for layer in weights.layers]

    def draft(self, block: Tensor, position: Tensor, contexts: Sequence[LayerContext]) -> Tensor:
        """Embedded blocks [R, S, E] at position [R, S] -> what the head reads, [R, S - 1, E]."""
        layers, ops, turn = self.weights.layers, self._ops, self._rope.at(position)
        reduce_norm = self.collectives.all_reduce_norm
        x = block.flatten(0, 1)
        normed = ops.rms_norm(x, layers[0].input_norm)
        for i, (layer, context) in enumerate(zip(layers, contexts, strict=True)):
            mixed = self._attend(layer, normed, turn, context)
            x, normed = reduce_norm(ops.linear(mixed, layer.out), x, layer.post_norm, ops)
            partial = layer.mlp.partial(ops, normed)
            x, normed = reduce_norm(partial, x, self._norm_after(i), ops)
        return normed.view(block.shape)[:, 1:].contiguous()

    def _norm_after(self, layer: int) -> RmsNorm:
        """What reads a layer's output: the next layer, or the head."""
        is_last = layer + 1 == len(self.weights.layers)
        return self.weights.norm if is_last else self.weights.layers[layer + 1].input_norm

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
