"""The demo drafter (DFlash) as a torch module for training and replay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdray.demo.training.layers import GatedMLP, Linear, RMSNorm, initialise
from kdray.demo.training.rope import plain_frequencies, rotate_halves
from kdray.demo.training.shapes import DrafterShape
from kdray.demo.training.target import DemoTarget


class BlockAttention(nn.Module):
    """Queries from the block; keys and values from the features before the root, and the block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = Linear(shape.hidden, shape.heads * shape.head)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * shape.head)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * shape.head)
        self.o_proj = Linear(shape.heads * shape.head, shape.hidden)
        self.q_norm = RMSNorm(shape.head, shape.eps)
        self.k_norm = RMSNorm(shape.head, shape.eps)

    def forward(
        self, x: Tensor, angles: Tensor, context: Tensor, context_angles: Tensor, mask: Tensor
    ) -> Tensor:
        """x [B, Q, hidden], context [B, S, hidden], mask bool [B, 1, Q, S + Q], True = visible."""
        q = rotate_halves(self.q_norm(self._heads(self.q_proj(x))), angles[:, :, None])
        k_block, v_block = self._keys_values(x, angles[:, :, None])
        k_context, v_context = self._keys_values(context, context_angles[None, :, None])
        v = torch.cat([v_context, v_block], dim=1).transpose(1, 2)
        k = torch.cat([k_context, k_block], dim=1).transpose(1, 2).to(v.dtype)
        group = self.shape.heads // self.shape.kv_heads
        out: Tensor = F.scaled_dot_product_attention(
            q.transpose(1, 2).to(v.dtype),
            k.repeat_interleave(group, dim=1),
            v.repeat_interleave(group, dim=1),
            attn_mask=mask,
        )
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def _keys_values(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        keys = rotate_halves(self.k_norm(self._heads(self.k_proj(x))), angles)
        return keys, self._heads(self.v_proj(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.shape.head)


class DrafterLayer(nn.Module):
    """One pre-norm layer of the block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = GatedMLP(shape.hidden, shape.width)

    def forward(
        self, x: Tensor, angles: Tensor, context: Tensor, context_angles: Tensor, mask: Tensor
    ) -> Tensor:
        """The block's stream [B, Q, hidden] after this layer; arguments as in the attention."""
        x = x + self.self_attn(self.input_layernorm(x), angles, context, context_angles, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DemoDrafter(nn.Module):
    """The drafter; embedding and head are the target's, the row of the mask token its own."""

    frequencies: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Linear(len(shape.feature_layers) * shape.hidden, shape.hidden)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.mask_row = nn.Parameter(torch.empty(1, shape.hidden))
        frequencies = plain_frequencies(shape.head, shape.theta)
        self.register_buffer("frequencies", frequencies, persistent=False)
        initialise(self, shape.layers)

    def forward(
        self, target: DemoTarget, tokens: Tensor, features: tuple[Tensor, ...], roots: Tensor
    ) -> Tensor:
        """tokens [B, S], features of every target layer, roots [B, A] -> logits [B, A, depth, V].

        Each root is drafted on its own, as if the tokens after it were not there.
        """
        shape, (rows, anchors) = self.shape, roots.shape
        chosen = torch.cat([features[i] for i in shape.feature_layers], dim=-1)
        context = self.hidden_norm(self.fc(chosen))
        context_angles = self._angles(torch.arange(tokens.shape[1], device=tokens.device))
        offsets = torch.arange(shape.block, device=tokens.device)
        angles = self._angles((roots[:, :, None] + offsets).flatten(1))
        x = self._block(target, tokens.gather(1, roots)).flatten(1, 2)
        mask = self._mask(roots, tokens.shape[1])
        for layer in self.layers:
            x = layer(x, angles, context, context_angles, mask)
        drafted = x.view(rows, anchors, shape.block, shape.hidden)[:, :, 1:]
        logits: Tensor = target.lm_head(self.norm(drafted))
        return logits

    def _block(self, target: DemoTarget, root_tokens: Tensor) -> Tensor:
        """Embedded blocks [B, A, block, hidden]: the root's token, then masks."""
        root = target.embed_tokens(root_tokens)[:, :, None].float()
        masks = self.mask_row.float().expand(*root_tokens.shape, self.shape.depth, -1)
        return torch.cat([root, masks], dim=2)

    def _mask(self, roots: Tensor, length: int) -> Tensor:
        """Each slot sees the positions before its root, and its own block."""
        device = roots.device
        root_of_slot = roots.repeat_interleave(self.shape.block, dim=1)
        before = torch.arange(length, device=device) < root_of_slot[:, :, None]
        block_of_slot = torch.arange(root_of_slot.shape[1], device=device) // self.shape.block
        same = block_of_slot[:, None] == block_of_slot[None, :]
        return torch.cat([before, same.expand(len(roots), -1, -1)], dim=2)[:, None]

    def _angles(self, positions: Tensor) -> Tensor:
        return positions.float()[..., None] * self.frequencies.float()
