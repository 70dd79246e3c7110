"""Rotary tables: YaRN for the target, plain for the drafter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kdray.demo.training.shapes import TargetShape


def yarn_frequencies(shape: TargetShape) -> Tensor:
    """Angle per position of each rope pair, fp32 [rope / 2], as DeepSeek's YaRN defines it."""
    yarn, dim = shape.yarn, shape.rope
    plain = shape.theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns ``times`` times over the original context."""
        ratio = yarn.original_positions / (times * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(shape.theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def softmax_scale(shape: TargetShape) -> float:
    """query^-0.5, times YaRN's m squared at every length."""
    m = 0.1 * shape.yarn.mscale_all_dim * math.log(shape.yarn.factor) + 1.0
    return float(shape.query**-0.5 * m * m)


def plain_frequencies(head: int, theta: float) -> Tensor:
    """Angle per position of each half-split pair, fp32 [head / 2]."""
    return theta ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)


def rotate_interleaved(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i+1); first members come out first, then second members.

    x [..., rope], angles [..., rope / 2] fp32. That order of the output is free as long as queries
    and keys share it.
    """
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (i, i + head / 2). x [..., head], angles [..., head / 2] fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
