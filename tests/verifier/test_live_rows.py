"""A round's rows say which of them are padding: behind a tree, and of requests that are none."""

from __future__ import annotations

import torch

from kdray.core.plan import DraftTrees
from kdray.driver.running import RunningState
from kdray.kernels.ops import RoutingRule
from kdray.kernels.page_tables import PageTables
from kdray.kernels.reference_fused import route_experts
from kdray.verifier.verifier import rows_on_device

RULE = RoutingRule(top_k=2, num_groups=1, top_groups=1, normalize=True, scale=1.0)


def test_padding_goes_to_no_expert() -> None:
    tables = PageTables(slots=4, pages=3, page_size=4, spare_page=9, device=torch.device("cpu"))
    state = RunningState(tables)
    rows = state.rows(torch.tensor([2, 0, -1], dtype=torch.int32))
    zeros = torch.zeros(3, 4, dtype=torch.int32)
    trees = DraftTrees(
        token=zeros,
        parent=zeros,
        depth=zeros,
        score=zeros,
        mask=zeros[..., None],
        num_nodes=torch.tensor([4, 2, 1], dtype=torch.int32),
    )
    live = rows_on_device(trees, zeros, rows).live
    expert, weight = route_experts(torch.randn(12, 8), torch.zeros(8), RULE, live)
    there = [[True] * 4, [True, True, False, False], [False] * 4]
    assert (expert >= 0).all(1).view(3, 4).tolist() == there
    assert (weight > 0).all(1).view(3, 4).tolist() == there
