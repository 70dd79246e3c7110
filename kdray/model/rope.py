"""Rotary position embedding with yarn, on interleaved pairs (2i, 2i + 1).

A pair is one complex number and a rotation one complex product (ops.rope_cache), so queries and
keys keep the checkpoint's own order of dimensions. Angles and rotations are fp32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kdray.model.config import ModelConfig, Yarn


class Rope(NamedTuple):
    """frequency [D / 2] fp32, radians per position; magnitude multiplies cos and sin."""

    frequency: Tensor
    magnitude: Tensor

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device | str = "cpu") -> Rope:
        frequency = rope_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
        magnitude = torch.tensor(cos_sin_scale(config.yarn))
        return cls(frequency.to(device), magnitude.to(device))

    def turns(self, position: Tensor) -> Tensor:
        """position [T] -> [T, D / 2] complex64: the rotation of every pair, for all layers."""
        return torch.polar(self.magnitude, position.float()[:, None] * self.frequency)


def rope_frequencies(dim: int, theta: float, yarn: Yarn | None) -> Tensor:
    """[dim / 2] fp32. Yarn (arXiv 2309.00071) divides slow pairs by its factor, keeps fast ones.

    Between the pairs that turn beta_fast and beta_slow times over the original context the two
    are blended linearly.
    """
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return plain
    low, high = _blend_range(dim, theta, yarn)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    slow = ramp.clamp(0, 1)
    return plain / yarn.factor * slow + plain * (1 - slow)


def _blend_range(dim: int, theta: float, yarn: Yarn) -> tuple[float, float]:
    """First and last pair of the blend."""

    def pair_turning(times: float) -> float:
        wavelengths = yarn.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
    # An empty range would divide by zero; a step as narrow as this one is what it means.
    return low, high + 0.001 if low == high else high


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def cos_sin_scale(yarn: Yarn | None) -> float:
    """What cos and sin are multiplied by; 1 where mscale equals mscale_all_dim."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale is None or yarn.mscale_all_dim is None:
        return _mscale(yarn.factor)
    return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(config: ModelConfig) -> float:
    """What scores are multiplied by: yarn sharpens it at every length, not only beyond training."""
    scale = 1.0 / math.sqrt(config.qk_head_dim)
    if config.yarn is not None and config.yarn.mscale_all_dim is not None:
        scale *= _mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
    return scale
