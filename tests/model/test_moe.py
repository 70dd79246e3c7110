from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdray.kernels.ops import RoutingRule, load_ops
from kdray.model.moe import DenseMLP, MoE, Router
from tests.model.tiny import huggingface

OPS = load_ops("cpu")
RULE = RoutingRule(top_k=2, num_groups=1, top_groups=1, normalize=True, scale=2.5)


def router(
    weight: Tensor | None = None, bias: Tensor | None = None, rule: RoutingRule = RULE
) -> Router:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(16, 8, generator=generator), torch.randn(8, generator=generator)
    return Router(
        ops=OPS,
        weight=drawn[0] if weight is None else weight,
        bias=drawn[1] if bias is None else bias,
        rule=rule,
    )


@pytest.mark.parametrize("kind", ["kimi", "deepseek"])
def test_routing_equals_transformers(kind: str) -> None:
    layer = huggingface(kind).model.layers[1]
    fields = layer.mlp.gate
    x = torch.randn(50, fields.weight.shape[1])
    rule = RoutingRule(
        top_k=fields.top_k,
        num_groups=fields.num_group,
        top_groups=fields.topk_group,
        normalize=fields.norm_topk_prob,
        scale=fields.routed_scaling_factor,
    )
    mine = router(fields.weight.T, fields.e_score_correction_bias, rule).route(x)
    _, weight, expert = fields(x)
    dense = torch.zeros(50, fields.num_experts)
    torch.testing.assert_close(
        dense.scatter(1, mine.expert, mine.weight), dense.scatter(1, expert, weight)
    )


def test_ties_go_to_the_lower_expert_and_group() -> None:
    x = torch.randn(3, 16)
    rule = replace(RULE, top_k=3)
    tied = router(torch.zeros(16, 8), torch.zeros(8), rule)
    assert tied.route(x).expert.tolist() == [[0, 1, 2]] * 3
    grouped = tied._replace(rule=replace(rule, num_groups=4, top_groups=2))
    assert grouped.route(x).expert.tolist() == [[0, 1, 2]] * 3


def test_experts_outside_the_best_groups_never_win() -> None:
    """With biases below -1 every score is negative: 0 for a masked expert would beat them all."""
    bias = torch.tensor([-5.0, -5.0, -9.0, -9.0, -9.0, -9.0, -9.0, -9.0])
    negative = router(bias=bias, rule=replace(RULE, num_groups=4, top_groups=1))
    assert negative.route(torch.randn(20, 16)).expert.sort(1).values.tolist() == [[0, 1]] * 20


def test_the_bias_steers_the_choice_but_not_the_weight() -> None:
    x = torch.randn(5, 16)
    bias = torch.full((8,), -10.0)
    bias[[3, 6]] = 10.0
    routing = router(bias=bias, rule=replace(RULE, normalize=False, scale=1.0)).route(x)
    assert routing.expert.sort(1).values.tolist() == [[3, 6]] * 5
    score = torch.sigmoid(x @ router().weight)
    torch.testing.assert_close(routing.weight, score.gather(1, routing.expert))
    normalized = router(bias=bias).route(x)
    torch.testing.assert_close(normalized.weight.sum(1), torch.full((5,), 2.5))


def layer(dtype: torch.dtype = torch.float32) -> MoE:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype)

    shared = DenseMLP(OPS, random(16, 40), random(20, 16))
    return MoE(OPS, router(), random(8, 16, 24), random(8, 12, 16), shared)


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
            OPS,
            wide.router,
            wide.gate_up.float(),
            wide.down.float(),
            DenseMLP(OPS, wide.shared.gate_up.float(), wide.shared.down.float()),
        ),
        x.float(),
    )
    torch.testing.assert_close(found.float(), exact, rtol=0.03, atol=0.03)


Form = Callable[[MoE, Tensor, Tensor], Tensor]


@pytest.mark.parametrize("form", [MoE._gathered, MoE._dense])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 9, 70])
def test_forms_of_fixed_shape_equal_the_loop_over_experts(
    form: Form, dtype: torch.dtype, num_rows: int
) -> None:
    """What a GPU runs, in which the host counts nothing."""
    moe = layer(dtype)
    x = torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    expert = moe.router.route(x).expert
    found = form(moe, x, expert)
    assert found.shape == (num_rows, 2, 16)
    wanted = moe._by_expert(x, expert)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found, wanted, **close)


def test_an_expert_that_overflows_spoils_only_rows_that_chose_it() -> None:
    moe = layer()
    moe.down[3] = torch.inf
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(5))
    expert = moe.router.route(x).expert
    spoilt = (expert == 3).any(1)
    assert spoilt.any() and not spoilt.all()
    for form in (MoE._gathered, MoE._dense):
        assert torch.equal(form(moe, x, expert).isfinite().all(-1).all(-1), ~spoilt)


def test_on_a_gpu_few_rows_gather_and_many_run_through_all_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 experts, 2 a row: gathering copies a third of them for two rows."""
    ran: list[tuple[str, int]] = []

    def form(name: str) -> Form:
        def run(moe: MoE, x: Tensor, expert: Tensor) -> Tensor:
            ran.append((name, len(x)))
            return x.new_empty(*expert.shape, 4)

        return run

    for name in ("_gathered", "_dense"):
        monkeypatch.setattr(MoE, name, form(name))
    on_gpu = torch.device("meta")  # neither computes nor is a CPU
    moe = layer()._replace(gate_up=torch.empty(16, 4, 6, device=on_gpu))
    for rows in (1, 2, 3, 1100):
        x, expert = torch.empty(rows, 4, device=on_gpu), torch.empty(rows, 2, device=on_gpu)
        assert moe._chosen(x, expert).shape == (rows, 2, 4)
    assert ran == [("_gathered", 1), ("_gathered", 2), ("_dense", 3), ("_dense", 512),
                   ("_dense", 512), ("_dense", 76)]  # fmt: skip
