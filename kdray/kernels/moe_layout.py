"""INT4 experts as moe_w4a16.cu reads them: tiles of 32 outputs by 32 inputs, 16 bytes a lane.

A tile is STEP_BYTES = 576 bytes: 32 lanes of 16 bytes, then the 32 outputs' scales, bf16. Output
4 g + 2 m + h of a tile is row g + 8 h of MMA fragment m; input 8 t + 4 k + 2 b + e is column
2 t + e + 8 b of its k-th product. Lane 4 g + t holds word 2 m + k of that, in which nibble
4 e + 2 b + h is q + 8. Groups of 32 inputs share a scale, so a tile's outputs have one each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 32  # outputs and inputs of a tile
SLICE = 16  # columns of gate, and of up, in a tile of both
WEIGHT_BYTES = 512
STEP_BYTES = WEIGHT_BYTES + 2 * TILE
_ZERO = 8


class Int4(NamedTuple):
    """q [.., out, in] int8, -8 .. 7; scale [.., out, in / 32] bfloat16: w = q * scale."""

    q: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """X experts of width E and intermediate size I, or a rank's part of it.

    gate_up   [X, I / 16, E / 32, 576] uint8: a tile is 16 columns of gate and the same of up
    down      [X, E / 32, I / 32, 576] uint8
    """

    gate_up: Tensor
    down: Tensor

    @classmethod
    def empty(
        cls, num_experts: int, width: int, inner: int, device: torch.device | str
    ) -> PackedExperts:
        """Room for experts that are packed one by one; width and inner are multiples of 32."""
        up = (num_experts, inner // SLICE, width // TILE, STEP_BYTES)
        down = (num_experts, width // TILE, inner // TILE, STEP_BYTES)
        return cls(*(torch.empty(s, dtype=torch.uint8, device=device) for s in (up, down)))

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def width(self) -> int:
        return self.gate_up.shape[2] * TILE

    @property
    def inner(self) -> int:
        return self.gate_up.shape[1] * SLICE

    def put(self, expert: int, gate: Int4, up: Int4, down: Int4) -> None:
        """Pack one expert's slices: gate, up [I, E], down [E, I]."""
        self.gate_up[expert] = pack(woven(gate, up)).to(self.gate_up.device)
        self.down[expert] = pack(down).to(self.down.device)


def woven(gate: Int4, up: Int4) -> Int4:
    """[.., I, E] each -> [.., 2 I, E]: two outputs of gate, the same two of up, and so on."""

    def weave(a: Tensor, b: Tensor) -> Tensor:
        pairs = [torch.unflatten(x, -2, (-1, 2)) for x in (a, b)]
        return torch.stack(pairs, dim=-3).flatten(-4, -2)

    return Int4(weave(gate.q, up.q), weave(gate.scale, up.scale))


def unwoven(both: Int4) -> tuple[Int4, Int4]:
    """What woven was given."""

    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = torch.unflatten(x, -2, (-1, 2, 2)).unbind(-3)
        return gate.flatten(-3, -2), up.flatten(-3, -2)

    (gate_q, up_q), (gate_scale, up_scale) = halves(both.q), halves(both.scale)
    return Int4(gate_q, gate_scale), Int4(up_q, up_scale)


def pack(weight: Int4) -> Tensor:
    """[.., out, in], multiples of 32 -> [.., out / 32, in / 32, 576] uint8."""
    q, scale = weight
    split = torch.unflatten(q.to(torch.uint8) + _ZERO, -1, (-1, 4, 2, 2, 2))  # t, k, b, e
    split = torch.unflatten(split, -6, (-1, 8, 2, 2))  # g, m, h
    nibbles = split.movedim(tuple(range(-9, 0)), tuple(_PLACES)).flatten(-9)
    nibbles = torch.unflatten(nibbles, -1, (q.shape[-2] // TILE, q.shape[-1] // TILE, -1, 2))
    weights = nibbles[..., 0] | nibbles[..., 1] << 4
    rows = torch.unflatten(scale.to(torch.bfloat16), -2, (-1, TILE)).transpose(-1, -2)
    return torch.cat([weights, rows.contiguous().view(torch.uint8)], dim=-1)


def unpack(tiles: Tensor) -> Int4:
    """What pack was given."""
    weights, scales = tiles.split_with_sizes([WEIGHT_BYTES, STEP_BYTES - WEIGHT_BYTES], dim=-1)
    nibbles = torch.stack([weights & 0xF, weights >> 4], dim=-1)
    split = torch.unflatten(nibbles.flatten(-2), -1, (8, 4, 2, 2, 2, 2, 2))
    split = split.movedim(tuple(_PLACES), tuple(range(-9, 0)))
    q = (split.flatten(-5).flatten(-5, -2)).to(torch.int8) - _ZERO
    scale = scales.contiguous().view(torch.bfloat16).transpose(-1, -2).flatten(-3, -2)
    return Int4(q, scale.contiguous())


# Where (out tile, g, m, h, in tile, t, k, b, e) go among (out tile, in tile, g, t, m, k, e, b, h).
_PLACES = (-9, -7, -5, -1, -8, -6, -4, -2, -3)
