from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdray.model.moe import DenseMLP, MoE, Router
from tests.model.tiny import huggingface


def router(num_experts: int = 8, width: int = 16, **facts: object) -> Router:
    generator = torch.Generator().manual_seed(0)
    fields = {
        "weight": torch.randn(width, num_experts, generator=generator),
        "bias": torch.randn(num_experts, generator=generator),
        "top_k": 2,
        "num_groups": 1,
        "top_groups": 1,
        "normalize": True,
        "scale": 2.5,
    }
    return Router(**(fields | facts))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["kimi", "deepseek"])
def test_routing_equals_transformers(kind: str) -> None:
    layer = huggingface(kind).model.layers[1]
    fields = layer.mlp.gate
    x = torch.randn(50, fields.weight.shape[1])
    mine = Router(
        weight=fields.weight.T,
        bias=fields.e_score_correction_bias,
        top_k=fields.top_k,
        num_groups=fields.num_group,
        top_groups=fields.topk_group,
        normalize=fields.norm_topk_prob,
        scale=fields.routed_scaling_factor,
    ).route(x)
    _, weight, expert = fields(x)
    dense = torch.zeros(50, fields.num_experts)
    torch.testing.assert_close(
        dense.scatter(1, mine.expert, mine.weight), dense.scatter(1, expert, weight)
    )


def test_ties_go_to_the_lower_expert_and_group() -> None:
    x = torch.randn(3, 16)
    tied = router(weight=torch.zeros(16, 8), bias=torch.zeros(8), top_k=3)
    assert tied.route(x).expert.tolist() == [[0, 1, 2]] * 3
    grouped = tied._replace(num_groups=4, top_groups=2)
    assert grouped.route(x).expert.tolist() == [[0, 1, 2]] * 3


def test_experts_outside_the_best_groups_never_win() -> None:
    """With biases below -1 every score is negative: 0 for a masked expert would beat them all."""
    bias = torch.tensor([-5.0, -5.0, -9.0, -9.0, -9.0, -9.0, -9.0, -9.0])
    negative = router(bias=bias, num_groups=4, top_groups=1)
    assert negative.route(torch.randn(20, 16)).expert.sort(1).values.tolist() == [[0, 1]] * 20


def test_the_bias_steers_the_choice_but_not_the_weight() -> None:
    x = torch.randn(5, 16)
    bias = torch.full((8,), -10.0)
    bias[[3, 6]] = 10.0
    routing = router(bias=bias, normalize=False, scale=1.0).route(x)
    assert routing.expert.sort(1).values.tolist() == [[3, 6]] * 5
    score = torch.sigmoid(x @ router().weight)
    torch.testing.assert_close(routing.weight, score.gather(1, routing.expert))
    normalized = router(bias=bias, scale=2.5).route(x)
    torch.testing.assert_close(normalized.weight.sum(1), torch.full((5,), 2.5))


def layer(dtype: torch.dtype = torch.float32) -> MoE:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype)

    shared = DenseMLP(random(16, 40), random(20, 16))
    return MoE(router(), random(8, 16, 24), random(8, 12, 16), shared)


def naive(moe: MoE, x: Tensor) -> Tensor:
    """Token by token, expert by expert."""

    def mlp(row: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (row @ gate_up).chunk(2)
        return (F.silu(gate) * up) @ down

    routing = moe.router.route(x)
    rows = []
    for row, experts, weights in zip(x, routing.expert, routing.weight, strict=True):
        total = mlp(row, moe.shared.gate_up, moe.shared.down)
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            total = total + weight * mlp(row, moe.gate_up[expert], moe.down[expert])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 100])
def test_experts_equal_the_naive_loop(num_rows: int) -> None:
    x = torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(num_rows))
    torch.testing.assert_close(layer().partial(x), naive(layer(), x), rtol=1e-5, atol=1e-5)


def test_bf16_rounds_the_sum_once() -> None:
    x = torch.randn(9, 16).bfloat16()
    found = layer(torch.bfloat16).partial(x)
    assert found.dtype == torch.bfloat16
    wide = layer(torch.bfloat16)
    exact = naive(
        MoE(
            wide.router,
            wide.gate_up.float(),
            wide.down.float(),
            DenseMLP(wide.shared.gate_up.float(), wide.shared.down.float()),
        ),
        x.float(),
    )
    torch.testing.assert_close(found.float(), exact, rtol=0.03, atol=0.03)
