"""Mixture of experts: the noaux_tc router, and the experts it chose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdray.kernels.fixed_rows import at_fixed_size, in_slices
from kdray.kernels.matmul import matmul
from kdray.kernels.moe_layout import PackedExperts
from kdray.kernels.ops import LiveRows, Ops, RoutingRule
from kdray.model.config import ModelConfig

# A gathered expert's weights are read, written, and read again; where all experts run they are read
# once. So gathering pays while rows choose less than a third as many experts as there are.
GATHER_COST = 3
# Rows an expert, on average, from which a grouped product beats all rows through all experts: on an
# H200 8 rows took 123 us for 81, 72 took 204 for 318 (64 experts of 512, width 2048, top 8).
GROUPED_ROWS = 24
DENSE_ROWS = 512  # rows that run through all experts at a time, which bounds the memory it takes


class Routing(NamedTuple):
    """expert [T, k] int64, best first; weight [T, k] fp32."""

    expert: Tensor
    weight: Tensor


class Router(NamedTuple):
    """Sigmoid scores with a selection bias and groups, all fp32.

    Every rank routes by itself from the same input bits, so all choose alike.

    weight [E, n_experts], fp32, or bf16 where rows are: their products are exact in fp32, in which
    they are summed. bias [n_experts] fp32
    """

    ops: Ops
    weight: Tensor
    bias: Tensor
    rule: RoutingRule

    @classmethod
    def of(cls, config: ModelConfig, weight: Tensor, bias: Tensor, ops: Ops) -> Router:
        return cls(ops, weight, bias.float(), routing_rule(config))

    def route(self, x: Tensor, live: LiveRows | None = None) -> Routing:
        """x [T, E] -> the chosen experts; -1 for rows that are not live."""
        return self.choose(self.logits(x), live)

    def logits(self, x: Tensor) -> Tensor:
        """[T, n_experts] fp32."""
        return self.ops.linear(x, self.weight, dtype=torch.float32)

    def logits_beside(self, x: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and gated_linear(x, gate_up) [T, I]: both read x, so a GPU takes one launch."""
        return self.ops.linear_and_gated(x, self.weight, gate_up, dtype=torch.float32)

    def choose(self, logits: Tensor, live: LiveRows | None = None) -> Routing:
        return Routing(*self.ops.route_experts(logits, self.bias, self.rule, live))


def routing_rule(config: ModelConfig) -> RoutingRule:
    return RoutingRule(
        top_k=config.num_experts_per_tok,
        num_groups=config.n_group,
        top_groups=config.topk_group,
        normalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


class DenseMLP(NamedTuple):
    """A plain SwiGLU, this rank's part: gate_up [E, 2 I], gate columns first; down [I, E]."""

    ops: Ops
    gate_up: Tensor
    down: Tensor

    def partial(self, x: Tensor, live: LiveRows | None = None) -> Tensor:
        """x [T, E] -> [T, E]: this rank's share of the output, of every row."""
        return self.behind(self.ops.gated_linear(x, self.gate_up))

    def behind(self, inner: Tensor) -> Tensor:
        """The second half: of what gate_up made of the rows, [T, I]."""
        return self.ops.linear(inner, self.down)


class MoE(NamedTuple):
    """One layer's X experts, this rank's part of each intermediate size I.

    gate_up [X, E, 2 I] gate columns, then up columns; down [X, I, E]
    shared  takes every row with weight 1
    """

    ops: Ops
    router: Router
    gate_up: Tensor
    down: Tensor
    shared: DenseMLP

    def partial(self, x: Tensor, live: LiveRows | None = None) -> Tensor:
        """x [T, E] -> [T, E]: this rank's share of the sum over routed and shared experts.

        Sums are fp32, rounded once. Padding is routed like any row: shapes are fixed here, and
        fewer rows would save nothing.
        """
        if not self.ops.batch_invariant:
            return self._partial(x)
        # What runs, and in which order it adds, follows from the shapes.
        return in_slices(x, lambda rows: at_fixed_size(rows, self._partial))

    def _partial(self, x: Tensor) -> Tensor:
        logits, inner = self.router.logits_beside(x, self.shared.gate_up)
        routing = self.router.choose(logits)
        if x.shape[0] == 1 and x.is_cpu:
            weighted = self._one_row(x, routing)
        else:
            weighted = self._chosen(x, routing.expert).float() * routing.weight[..., None]
            weighted = weighted.sum(1)
        return (weighted + self.shared.behind(inner)).to(x.dtype)

    def _one_row(self, x: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of a single row, which needs no sorting: plain decoding spends 0.1 ms
        less."""
        experts = routing.expert[0].tolist()
        inner = [self.ops.swiglu(matmul(x, self.gate_up[e])) for e in experts]
        outputs = [matmul(row, self.down[e]) for row, e in zip(inner, experts, strict=True)]
        return routing.weight @ torch.cat(outputs).float()

    def _chosen(self, x: Tensor, expert: Tensor) -> Tensor:
        """x [T, E], expert [T, k] -> [T, k, E]: what each row's experts make of it.

        On a CPU every expert runs over its own rows, which the host counts. A GPU must not wait for
        the host, and its graphs want fixed shapes: few rows gather their experts' weights, more run
        through all experts, many go side by side through a grouped product where there is one.
        """
        if x.is_cpu:
            return self._by_expert(x, expert)
        if GATHER_COST * expert.numel() <= len(self.gate_up):
            return self._gathered(x, expert)
        if expert.numel() >= GROUPED_ROWS * len(self.gate_up) and has_grouped_product(x, self.down):
            return self._grouped(x, expert)
        pieces = zip(x.split(DENSE_ROWS), expert.split(DENSE_ROWS), strict=True)
        return torch.cat([self._dense(rows, chosen) for rows, chosen in pieces])

    def _by_expert(self, x: Tensor, expert: Tensor) -> Tensor:
        """Rows laid side by side by expert. On one core with 8 experts of 128 this beats one wide
        product over all of them from 1 row on (5 layers: 1 row 0.68 ms for 0.82, 17 rows 2.0 for
        2.4, 64 rows 2.5 for 4.1).
        """
        num_rows, top_k = expert.shape
        choice = expert.flatten()
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice).tolist()
        rows = x.index_select(0, order.div(top_k, rounding_mode="floor"))
        inner = self.ops.swiglu(_per_expert(rows, self.gate_up, counts))
        by_expert = _per_expert(inner, self.down, counts)
        by_row = torch.empty_like(by_expert).index_copy_(0, order, by_expert)
        return by_row.view(num_rows, top_k, -1)

    def _gathered(self, x: Tensor, expert: Tensor) -> Tensor:
        """Every row by its own copies of its experts' weights."""
        chosen = expert.flatten()
        rows = x[:, None].expand(-1, expert.shape[1], -1).reshape(len(chosen), 1, -1)
        inner = self.ops.swiglu(torch.bmm(rows, self.gate_up.index_select(0, chosen)))
        return torch.bmm(inner, self.down.index_select(0, chosen)).view(*expert.shape, -1)

    def _grouped(self, x: Tensor, expert: Tensor) -> Tensor:
        """Rows laid side by side by expert, whose counts stay on the device."""
        num_rows, top_k = expert.shape
        choice = expert.flatten()
        order = choice.argsort(stable=True)
        counts = torch.zeros(len(self.gate_up), dtype=torch.int32, device=x.device)
        counts.index_add_(0, choice, torch.ones_like(choice, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = x.index_select(0, order.div(top_k, rounding_mode="floor"))
        inner = self.ops.swiglu(torch._grouped_mm(rows, self.gate_up, offs=ends))
        by_expert = torch._grouped_mm(inner, self.down, offs=ends)
        by_row = torch.empty_like(by_expert).index_copy_(0, order, by_expert)
        return by_row.view(num_rows, top_k, -1)

    def _dense(self, x: Tensor, expert: Tensor) -> Tensor:
        """All rows by all experts, of which each row takes its own."""
        num_experts = len(self.gate_up)
        inner = torch.bmm(x.expand(num_experts, -1, -1), self.gate_up)
        outputs = torch.bmm(self.ops.swiglu(inner), self.down)
        row = torch.arange(len(x), device=x.device)[:, None]
        return outputs[expert, row]


class PackedMoE(NamedTuple):
    """The same layer, its experts' weights INT4 as moe_w4a16 reads them: a quarter of the bytes."""

    ops: Ops
    router: Router
    experts: PackedExperts
    shared: DenseMLP

    def partial(self, x: Tensor, live: LiveRows | None = None) -> Tensor:
        """As MoE.partial; a weight is q * scale, where MoE has that rounded to its dtype.

        Rows that are not live (None: all are) visit the shared expert alone, and no weights are
        read for them.
        """
        logits, inner = self.router.logits_beside(x, self.shared.gate_up)
        shared = self.shared.behind(inner)
        routing = self.router.choose(logits, live)
        return self.ops.moe_w4a16(x, *routing, self.experts, shared)


def has_grouped_product(x: Tensor, down: Tensor) -> bool:
    """Whether torch multiplies groups of rows x [T, E] by a kernel, down being [X, I, E].

    On other GPUs it counts them on the host, which a graph cannot; and it wants rows of a multiple
    of 16 bytes.
    """
    if x.dtype != torch.bfloat16 or x.shape[1] % 8 or down.shape[1] % 8:
        return False
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def _per_expert(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """The first counts[0] rows times weight[0], the next counts[1] times weight[1], .. stacked."""
    parts = rows.split_with_sizes(counts)
    return torch.cat([matmul(part, weight[x]) for x, part in enumerate(parts) if counts[x]])
