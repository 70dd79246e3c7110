"""Layers that target and drafter share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A product without bias; the input takes the weight's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return F.linear(input.to(self.weight.dtype), self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> fp32 [..., width]."""
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width)
        self.up_proj = Linear(hidden, width)
        self.down_proj = Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def initialise(module: nn.Module, depth: int) -> None:
    """Normal weights; those that write to the residual stream are smaller by sqrt(2 depth)."""
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        writes = name.endswith(("o_proj.weight", "down_proj.weight", "experts_down"))
        nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if writes else 0.02)
