"""Mixture of experts: the noaux_tc router and two ways to run the experts it chose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdray.model.config import ModelConfig
from kdray.model.layers import linear, swiglu

# Up to these sizes one product over all experts beats gathering the chosen ones.
WIDE_MAX_INTERMEDIATE = 4096
WIDE_MAX_ROWS = 64


class Routing(NamedTuple):
    """expert [T, k] int64, best first; weight [T, k] fp32."""

    expert: Tensor
    weight: Tensor


class Router(NamedTuple):
    """Sigmoid scores with a selection bias and groups, all fp32.

    Every rank routes by itself from the same input bits, so all choose alike.

    weight [n_experts, E], bias [n_experts], both fp32
    """

    weight: Tensor
    bias: Tensor
    top_k: int
    num_groups: int
    top_groups: int
    normalize: bool
    scale: float

    @classmethod
    def of(cls, config: ModelConfig, weight: Tensor, bias: Tensor) -> Router:
        return cls(
            weight=weight.float(),
            bias=bias.float(),
            top_k=config.num_experts_per_tok,
            num_groups=config.n_group,
            top_groups=config.topk_group,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )

    def route(self, x: Tensor) -> Routing:
        """x [T, E] -> the chosen experts; the bias steers the choice, never the weight."""
        score = torch.sigmoid(linear(x.float(), self.weight))
        choice = score + self.bias
        if self.num_groups > 1:
            choice = self._within_best_groups(choice)
        expert = _best(choice, self.top_k)
        weight = score.gather(1, expert)
        if self.normalize:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return Routing(expert, weight * self.scale)

    def _within_best_groups(self, choice: Tensor) -> Tensor:
        """Keep the groups whose two best experts sum highest; the others get -inf.

        Not 0: with a negative bias 0 would beat experts of the chosen groups.
        """
        grouped = torch.unflatten(choice, 1, (self.num_groups, -1))
        group_score = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(group_score, dtype=torch.bool)
        kept.scatter_(1, _best(group_score, self.top_groups), True)
        return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def _best(score: Tensor, k: int) -> Tensor:
    """Indices [T, k] of the largest, the lower index first among equals (topk promises none)."""
    return score.sort(dim=1, descending=True, stable=True).indices[:, :k]


class MoE(NamedTuple):
    """One layer's experts, this rank's part of each intermediate size.

    The shared expert of width n_shared * I is stored as n_shared further experts X - n_shared ..,
    each chosen by every row with weight 1.

    gate_up [X, 2 I, E] gate rows, then up rows; down [X, I, E], transposed
    """

    router: Router
    gate_up: Tensor
    down: Tensor
    num_routed: int

    def partial(self, x: Tensor) -> Tensor:
        """x [T, E] -> [T, E]: this rank's share of the sum over routed and shared experts."""
        routing = self.router.route(x)
        num_experts, intermediate, _ = self.down.shape
        if x.shape[0] <= WIDE_MAX_ROWS and num_experts * intermediate <= WIDE_MAX_INTERMEDIATE:
            return self._all_experts(x, routing)
        return self._chosen_experts(x, routing)

    def _all_experts(self, x: Tensor, routing: Routing) -> Tensor:
        """One wide product; experts that were not chosen count with weight 0."""
        num_experts, intermediate, width = self.down.shape
        weight = x.new_zeros(x.shape[0], num_experts)
        weight[:, self.num_routed :] = 1.0
        weight.scatter_(1, routing.expert, routing.weight.to(x.dtype))
        gate_up = linear(x, self.gate_up.view(-1, width))
        inner = swiglu(gate_up.view(-1, num_experts, 2 * intermediate)) * weight[..., None]
        return inner.flatten(1) @ self.down.view(-1, width)

    def _chosen_experts(self, x: Tensor, routing: Routing) -> Tensor:
        """Each distinct expert over its own rows; sums in fp32, rounded once."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for shared in range(self.num_routed, self.down.shape[0]):
            total += self._expert(shared, x)
        for expert in torch.unique(routing.expert).tolist():
            row, choice = torch.where(routing.expert == expert)
            weight = routing.weight[row, choice, None]
            total.index_add_(0, row, self._expert(expert, x.index_select(0, row)) * weight)
        return total.to(x.dtype)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        return (swiglu(linear(x, self.gate_up[expert])) @ self.down[expert]).float()


class DenseMLP(NamedTuple):
    """A plain SwiGLU, this rank's part: gate_up [2 I, E], gate rows then up rows; down [E, I]."""

    gate_up: Tensor
    down: Tensor

    def partial(self, x: Tensor) -> Tensor:
        """x [T, E] -> [T, E]: this rank's share of the output."""
        return linear(swiglu(linear(x, self.gate_up)), self.down)
