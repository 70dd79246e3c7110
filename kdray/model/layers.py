"""The small pieces every layer is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, statistics in fp32.

    The normalised x is rounded to its own dtype before the weight, as the family was trained.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., in] times weight [out, in] -> [.., out]; the family has no biases."""
    return F.linear(x, weight)


def swiglu(gate_up: Tensor) -> Tensor:
    """[.., 2 I], gate then up -> silu(gate) * up [.., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
