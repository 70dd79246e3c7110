from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

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


HALF_ULP = 2.0**-8  # what rounding to bf16 changes a value by at most, as a part of it
FP32_SUM = 2.0**-20  # what a few fp32 sums change, as a part of their terms


class Bounded(NamedTuple):
    """Values in float64, and how far a computation in bf16 may be from each."""

    value: Tensor
    error: Tensor


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Bounded:
    """A SwiGLU that rounds gate, up, silu(gate), its product with up, and the output; what is wrong
    with gate and up goes on through the product, to the first order."""
    gate, up = (x.double() @ gate_up.double()).chunk(2, dim=-1)
    sigmoid, silu = torch.sigmoid(gate), F.silu(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    inner, down = silu * up, down.double()
    carried = (slope * gate * up).abs() + 3 * inner.abs()
    value = inner @ down
    return Bounded(value, HALF_ULP * (carried @ down.abs() + value.abs()))


def chosen_in_double(moe: MoE, x: Tensor, expert: Tensor) -> Bounded:
    """All rows by all experts, of which each row takes its own."""
    experts = [mlp(x, *weights) for weights in zip(moe.gate_up, moe.down, strict=True)]
    row = torch.arange(len(x))[:, None]
    return Bounded(*(torch.stack(of)[expert, row] for of in zip(*experts, strict=True)))


def layer_in_double(moe: MoE, x: Tensor) -> Bounded:
    routing = moe.router.route(x)
    value, error = chosen_in_double(moe, x, routing.expert)
    shared, weight = mlp(x, moe.shared.gate_up, moe.shared.down), routing.weight[..., None].double()
    total = shared.value + (weight * value).sum(1)
    return Bounded(total, shared.error + (weight * error).sum(1) + HALF_ULP * total.abs())


def assert_as_rounded(found: Tensor, wanted: Bounded) -> None:
    off = (found.double() - wanted.value).abs()
    assert (off <= 1.1 * wanted.error + 1e-5).all()  # second orders, and sums in fp32


@pytest.mark.parametrize("num_rows", [1, 2000])
def test_bf16_is_as_far_off_as_its_roundings(num_rows: int) -> None:
    moe = layer(torch.bfloat16)
    for draw in range(100 if num_rows == 1 else 1):
        drawn = torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(draw))
        x = drawn.bfloat16()
        found = moe.partial(x)
        assert found.dtype == torch.bfloat16
        assert_as_rounded(found, layer_in_double(moe, x))


def test_bf16_rounds_the_sum_once() -> None:
    """Of the experts' outputs as they are, bf16 themselves: one rounding, at the end."""
    moe = layer(torch.bfloat16)
    x = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    routing = moe.router.route(x)
    terms = moe._chosen(x, routing.expert).double() * routing.weight[..., None].double()
    terms = torch.cat([terms, moe.shared.partial(x)[:, None].double()], dim=1)
    total = terms.sum(1)
    off = (moe.partial(x).double() - total).abs()
    assert (off <= HALF_ULP * total.abs() + FP32_SUM * terms.abs().sum(1)).all()


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
    if dtype == torch.float32:
        torch.testing.assert_close(found, moe._by_expert(x, expert), rtol=1e-5, atol=1e-5)
    else:
        assert_as_rounded(found, chosen_in_double(moe, x, expert))


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
