"""Mixture of experts: the noaux_tc router and two ways to run the experts it chose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdray.model.config import ModelConfig
from kdray.model.layers import swiglu

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

    weight [E, n_experts], bias [n_experts], both fp32
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
            weight=weight.float().T.contiguous(),
            bias=bias.float(),
            top_k=config.num_experts_per_tok,
            num_groups=config.n_group,
            top_groups=config.topk_group,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )

    def route(self, x: Tensor) -> Routing:
        """x [T, E] -> the chosen experts; the bias steers the choice, never the weight."""
        score = torch.sigmoid(x.float() @ self.weight)
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

    The shared expert of width n_shared * I is stored as n_shared further experts behind the
    num_routed ones, each taken by every row with weight 1.

    gate_up [X, E, 2 I] gate columns, then up columns; down [X, I, E]: see empty_experts
    """

    router: Router
    gate_up: Tensor
    down: Tensor
    num_routed: int

    def partial(self, x: Tensor) -> Tensor:
        """x [T, E] -> [T, E]: this rank's share of the sum over routed and shared experts."""
        routing = self.router.route(x)
        if x.shape[0] <= WIDE_MAX_ROWS and _is_wide(*self.down.shape[:2]):
            return self._all_experts(x, routing)
        return self._chosen_experts(x, routing)

    def _all_experts(self, x: Tensor, routing: Routing) -> Tensor:
        """One wide product; experts that were not chosen count with weight 0."""
        num_experts, intermediate, width = self.down.shape
        weight = x.new_zeros(x.shape[0], num_experts)
        weight[:, self.num_routed :] = 1.0
        weight.scatter_(1, routing.expert, routing.weight.to(x.dtype))
        gate_up = x @ self.gate_up.transpose(0, 1).view(width, -1)
        inner = swiglu(gate_up.view(-1, num_experts, 2 * intermediate)) * weight[..., None]
        return inner.flatten(1) @ self.down.view(-1, width)

    def _chosen_experts(self, x: Tensor, routing: Routing) -> Tensor:
        """Each expert over its own rows, which lie side by side; sums in fp32, rounded once."""
        num_rows, top_k = routing.expert.shape
        order = routing.expert.flatten().argsort(stable=True)
        counts = torch.bincount(routing.expert.flatten(), minlength=self.num_routed).tolist()
        chosen = [expert for expert, count in enumerate(counts) if count]
        sizes = [counts[expert] for expert in chosen]
        rows = x.index_select(0, order.div(top_k, rounding_mode="floor"))
        inner = swiglu(self._products(rows, self.gate_up, chosen, sizes))
        sorted_out = self._products(inner, self.down, chosen, sizes)
        out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
        weighted = out.view(num_rows, top_k, -1).float() * routing.weight[..., None]
        return (weighted.sum(1) + self._shared(x)).to(x.dtype)

    def _products(
        self, rows: Tensor, weight: Tensor, experts: list[int], sizes: list[int]
    ) -> Tensor:
        """The next sizes[i] rows times the weight of experts[i], stacked again."""
        parts = zip(experts, rows.split_with_sizes(sizes), strict=True)
        return torch.cat([part @ weight[expert] for expert, part in parts])

    def _shared(self, x: Tensor) -> Tensor:
        outputs = [
            swiglu(x @ gate_up) @ down
            for gate_up, down in zip(
                self.gate_up[self.num_routed :], self.down[self.num_routed :], strict=True
            )
        ]
        return torch.stack(outputs).sum(0, dtype=torch.float32)


def empty_experts(
    num_experts: int, width: int, intermediate: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Room for gate_up [X, E, 2 I] and down [X, I, E].

    Where the wide product is used, gate_up's memory is that of one [E, X * 2 I] matrix.
    """
    down = torch.empty(num_experts, intermediate, width, dtype=dtype, device=device)
    if _is_wide(num_experts, intermediate):
        gate_up = torch.empty(width, num_experts, 2 * intermediate, dtype=dtype, device=device)
        return gate_up.transpose(0, 1), down
    return torch.empty(num_experts, width, 2 * intermediate, dtype=dtype, device=device), down


def _is_wide(num_experts: int, intermediate: int) -> bool:
    return num_experts * intermediate <= WIDE_MAX_INTERMEDIATE


class DenseMLP(NamedTuple):
    """A plain SwiGLU, this rank's part: gate_up [E, 2 I], gate columns first; down [I, E]."""

    gate_up: Tensor
    down: Tensor

    def partial(self, x: Tensor) -> Tensor:
        """x [T, E] -> [T, E]: this rank's share of the output."""
        return swiglu(x @ self.gate_up) @ self.down
