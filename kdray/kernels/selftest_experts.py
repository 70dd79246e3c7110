"""The self-test's cases of routed INT4 experts: one for each kernel that numbers of rows choose."""

from __future__ import annotations

import torch
from torch import Tensor

from kdray.kernels.cuda_moe import FEW_ROWS, rows_for_many
from kdray.kernels.ops import Ops
from kdray.kernels.selftest_inputs import Inputs


def some_rows(ops: Ops, given: Inputs) -> list[Tensor]:
    return _routed(ops, given, [FEW_ROWS + 1, 40])


def few_rows(ops: Ops, given: Inputs) -> list[Tensor]:
    """Behind one another as well: what a launch leaves is what the ones behind it begin with."""
    return _routed(ops, given, [1, FEW_ROWS, FEW_ROWS, 1])


def many_rows(ops: Ops, given: Inputs) -> list[Tensor]:
    rule = given.sizes.rule
    if rule is None or not given.sizes.packed:
        return []
    return _routed(ops, given, [rows_for_many(given.experts.num_experts, rule.top_k)])


def _routed(ops: Ops, given: Inputs, numbers: list[int]) -> list[Tensor]:
    """Rows routed to experts that were written; the last of more than few rows is padding."""
    sizes, rule = given.sizes, given.sizes.rule
    if rule is None or not sizes.packed:
        return []
    used, experts = torch.tensor(given.written_experts), given.experts
    outputs = []
    for seed, rows in enumerate(numbers):
        x, shared = given.drawn(21 + seed, rows, sizes.width), given.drawn(22, rows, sizes.width)
        order = torch.rand(rows, len(used), generator=torch.Generator().manual_seed(rows + seed))
        chosen = used[order.argsort()[:, : rule.top_k]].to(given.device)
        weight = given.drawn(23, *chosen.shape, dtype=torch.float32).abs()
        if rows > FEW_ROWS:
            chosen[-1], weight[-1] = -1, 0.0
        given.settle()
        outputs.append(ops.moe_w4a16(x, chosen, weight, experts, shared))
    return outputs
