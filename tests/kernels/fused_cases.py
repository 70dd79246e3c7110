"""The fused ops against their exact values, on shapes as models have them and as nobody does.

Used for the kernels on a GPU and for their source on the CPU: inputs are made on the CPU from a
seed and moved to where the ops live; float64 of the same rounded inputs decides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdray.kernels import cuda_fused, latent_rows, reference_fused
from kdray.kernels.cuda_fused import CudaFused
from kdray.kernels.ops import LiveRows, RoutingRule

DTYPES = (torch.float32, torch.bfloat16)
# Two roundings to bfloat16; in float32 a sum, an exponential and a root beside the roundings.
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-7 * 1.01}


class SomeNorm(NamedTuple):
    weight: Tensor
    eps: Tensor


class SomeRows(NamedTuple):
    turns: Tensor
    slot: Tensor


class Attention(NamedTuple):
    """Sizes of one layer: heads, and the widths N, D and C of ops.py."""

    heads: int
    nope: int
    rope: int
    latent: int


ATTENTIONS = {
    "kimi, 8 heads": Attention(8, 128, 64, 512),
    "kimi, 64 heads": Attention(64, 128, 64, 512),
    "demo": Attention(8, 32, 16, 64),
    "tiny": Attention(3, 16, 8, 32),
    "no nope, widest": Attention(1, 0, 128, 1024),
}
RULES = {
    "kimi": (384, RoutingRule(top_k=8, num_groups=1, top_groups=1, normalize=True, scale=2.827)),
    "deepseek": (256, RoutingRule(top_k=8, num_groups=8, top_groups=4, normalize=True, scale=2.5)),
    "bench": (64, RoutingRule(top_k=8, num_groups=1, top_groups=1, normalize=True, scale=2.5)),
    "demo": (8, RoutingRule(top_k=2, num_groups=1, top_groups=1, normalize=True, scale=1.5)),
    "tiny": (16, RoutingRule(top_k=3, num_groups=4, top_groups=2, normalize=False, scale=1.0)),
    "all": (24, RoutingRule(top_k=24, num_groups=3, top_groups=3, normalize=True, scale=1.0)),
    "groups of one": (
        20,
        RoutingRule(top_k=2, num_groups=20, top_groups=5, normalize=True, scale=0.5),
    ),
    "most": (1024, RoutingRule(top_k=32, num_groups=32, top_groups=7, normalize=True, scale=1.0)),
    "odd": (77, RoutingRule(top_k=5, num_groups=7, top_groups=2, normalize=False, scale=3.0)),
    "one more": (33, RoutingRule(top_k=8, num_groups=1, top_groups=1, normalize=True, scale=2.0)),
    "lists whole": (
        70,
        RoutingRule(top_k=32, num_groups=2, top_groups=1, normalize=True, scale=1.0),
    ),
    "the best": (384, RoutingRule(top_k=1, num_groups=3, top_groups=1, normalize=False, scale=1.0)),
}
ROUTINGS = ("normal", "ties", "alike", "negative", "holes", "no numbers")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_norm(width: int, dtype: torch.dtype, device: torch.device) -> SomeNorm:
    weight = (1 + 0.2 * drawn(1, width)).to(device, dtype)
    return SomeNorm(weight, torch.tensor(1e-5, device=device))


def exact_norm(x: Tensor, norm: SomeNorm) -> Tensor:
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + norm.eps.double()).rsqrt()
    return wide * scale * norm.weight.double()


def assert_near(found: Tensor, exact: Tensor, floor: float = 1e-30) -> None:
    bound = RELATIVE[found.dtype] * exact.abs() + floor
    assert (found.double() - exact).abs().le(bound).all()


def assert_mostly_equal(found: Tensor, reference: Tensor) -> None:
    """bfloat16 differs only where float32's last bits tip a rounding."""
    assert found.dtype == reference.dtype and found.shape == reference.shape
    if found.dtype == torch.bfloat16:
        assert (found != reference).double().mean().item() < 0.01


def check_norm(fused: CudaFused, rows: int, width: int, dtype: torch.dtype, gap: int) -> None:
    """x lies `gap` vectors inside rows that are wider by as much, as a part of a product."""
    device = fused.device
    norm = some_norm(width, dtype, device)
    inside = gap * 16 // dtype.itemsize
    x = (3 * drawn(rows, rows, width + 2 * inside)).to(device, dtype)[:, inside : inside + width]
    x[:, 0] *= 50
    delta = drawn(rows + 1, rows, width).to(device, dtype)
    assert cuda_fused.takes_norm(x, norm)
    before = x.clone()
    found = fused.rms_norm(x, norm)
    assert_near(found, exact_norm(x, norm))
    assert_mostly_equal(found, reference_fused.rms_norm(x, norm))
    total, found = fused.add_rms_norm(x, delta, norm)
    assert torch.equal(total, x + delta)
    assert_near(found, exact_norm(total, norm))
    assert_mostly_equal(found, reference_fused.rms_norm(total, norm))
    assert torch.equal(x, before)


def check_rope(
    fused: CudaFused, rows: int, sizes: Attention, dtype: torch.dtype, joined: bool
) -> None:
    """kv is the end of a wider product; `joined`: the queries are its beginning."""
    device, (heads, nope, rope, latent) = fused.device, sizes
    width = heads * (nope + rope)
    product = (2 * drawn(rows, rows, width + latent + rope)).to(device, dtype)
    query, kv = product.split([width, latent + rope], dim=1)
    query = query.view(rows, heads, -1) if joined else query.reshape(rows, heads, -1)
    num_slots = 2 * rows + 3
    slot = torch.randperm(num_slots, generator=torch.Generator().manual_seed(rows))[:rows]
    angle = 100 * drawn(3, rows, rope // 2)
    placed = SomeRows(torch.polar(torch.full_like(angle, 1.3), angle).to(device), slot.to(device))
    norm = some_norm(latent, dtype, device)
    cache = drawn(4, num_slots, latent + rope).to(device, dtype)
    before, expected = cache.clone(), cache.clone()
    assert cuda_fused.takes_rope(query, kv, cache, placed, norm)
    found = fused.rope_cache(query, kv, cache, placed, norm)[..., latent:]
    wanted = reference_fused.rope_cache(query, kv, expected, placed, norm)[..., latent:]
    assert_turned(found, query[..., nope:], placed.turns[:, None])
    assert_mostly_equal(found, wanted)
    written = cache[placed.slot]
    assert_near(written[:, :latent], exact_norm(kv[:, :latent], norm))
    assert_turned(written[:, latent:], kv[:, latent:], placed.turns)
    assert_mostly_equal(written, expected[placed.slot])
    untouched = torch.ones(num_slots, dtype=torch.bool).index_fill(0, slot, False).to(device)
    assert torch.equal(cache[untouched], before[untouched])


def assert_turned(found: Tensor, x: Tensor, turns: Tensor) -> None:
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    exact = torch.view_as_real(pairs * turns.to(torch.complex128)).flatten(-2)
    # What cancels is as uncertain as the products were.
    assert_near(found, exact, floor=2e-7 * 1.3 * x.abs().max().item())


def check_rope_fp8(fused: CudaFused, rows: int, sizes: Attention) -> None:
    """Rows in fp8 are, to the last bit, the quantised ones of the kernel's own rows in bfloat16;
    among them one of zeros, one of tiny numbers, one of large ones and one that is no number."""
    device, (heads, nope, rope, latent) = fused.device, sizes
    query = drawn(rows, rows, heads, nope + rope).to(device, torch.bfloat16)
    kv = (3 * drawn(rows + 1, rows, latent + rope)).to(device, torch.bfloat16)
    norm = some_norm(latent, torch.bfloat16, device)
    kv[0, :latent] = 0
    kv[1 % rows, :latent] *= 1e-35
    kv[2 % rows, 5] = 3e30
    kv[3 % rows, 7] = torch.nan
    slot = torch.randperm(2 * rows + 3, generator=torch.Generator().manual_seed(rows))[:rows]
    slot[-1] = -1
    angle = drawn(3, rows, rope // 2)
    placed = SomeRows(torch.polar(torch.ones_like(angle), angle).to(device), slot.to(device))
    plain = torch.zeros(2 * rows + 3, latent + rope, dtype=torch.bfloat16, device=device)
    width = latent_rows.row_bytes(latent, rope)
    cache = torch.full((2 * rows + 3, width), 0xFF, dtype=torch.uint8, device=device)
    assert cuda_fused.takes_rope(query, kv, cache, placed, norm)
    found = fused.rope_cache(query, kv, cache, placed, norm)[..., latent:]
    wanted = fused.rope_cache(query, kv, plain, placed, norm)[..., latent:]
    assert torch.equal(found, wanted)
    own, other = slot[:-1].to(device), torch.ones(2 * rows + 3, dtype=torch.bool, device=device)
    expected = latent_rows.quantised(plain[own, :latent], plain[own, latent:])
    nan = plain[own, :latent].isnan().any(1)
    torch.testing.assert_close(cache[own][~nan], expected[~nan], rtol=0, atol=0)
    assert latent_rows.dequantised(cache[own], latent, rope)[nan, :latent].isnan().all()
    other[own] = False
    assert cache[other].eq(0xFF).all()


def check_padding(fused: CudaFused) -> None:
    """Rows whose slot no cache has are written nowhere, and turned like the others."""
    device, (heads, nope, rope, latent) = fused.device, ATTENTIONS["tiny"]
    query, kv = drawn(1, 5, heads, nope + rope).to(device), drawn(2, 5, latent + rope).to(device)
    turns = torch.polar(torch.ones(5, rope // 2), drawn(3, 5, rope // 2)).to(device)
    norm = some_norm(latent, torch.float32, device)
    cache = drawn(4, 6, latent + rope).to(device)
    expected = cache.clone()
    real = [1, 3]
    slot = torch.tensor([-1, 5, 6, 0, 2**40], device=device)
    own = SomeRows(turns[real], slot[real])
    reference_fused.rope_cache(query[real], kv[real], expected, own, norm)
    found = fused.rope_cache(query, kv, cache, SomeRows(turns, slot), norm)
    torch.testing.assert_close(cache, expected, rtol=1e-5, atol=1e-6)
    assert_turned(found[..., latent:], query[..., nope:], turns[:, None])


def check_swiglu(fused: CudaFused, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = (4 * drawn(sum(shape), *shape)).to(fused.device, dtype)
    assert cuda_fused.takes_swiglu(gate_up)
    found = fused.swiglu(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(found, gate * torch.sigmoid(gate) * up)
    assert_mostly_equal(found, reference_fused.swiglu(gate_up))


def check_swiglu_far_out(fused: CudaFused) -> None:
    gate = torch.tensor([-torch.inf, -200.0, -88.0, -0.0, 0.0, 88.0, torch.inf, torch.nan])
    gate_up = torch.cat([gate, torch.full_like(gate, 2.0)])[None].to(fused.device)
    found = fused.swiglu(gate_up)
    wanted = reference_fused.swiglu(gate_up)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-35, equal_nan=True)


def routing_inputs(rows: int, experts: int, kind: str) -> tuple[Tensor, Tensor]:
    """Normal; on a coarse grid of ties; ties all; or with numbers that are none."""
    logits, bias = 2 * drawn(rows, rows, experts), 0.3 * drawn(7, experts)
    if kind == "ties":
        logits, bias = logits.round(), bias.sign()
    if kind == "alike":
        # Of other numbers torch's exponentials differ from place to place.
        logits, bias = 0 * logits, 0 * bias
    if kind == "no numbers":
        logits[:, 1::3] = torch.nan
    if kind == "negative":
        bias = bias - 9
    if kind == "holes":
        which = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows))
        logits[which < 0.1] = -torch.inf
        logits[(which > 0.1) & (which < 0.15)] = torch.inf
        logits[1 % rows, experts // 2] = torch.nan
    return logits, bias


def check_routing(fused: CudaFused, rows: int, name: str, kind: str) -> None:
    experts, rule = RULES[name]
    logits, bias = (t.to(fused.device) for t in routing_inputs(rows, experts, kind))
    assert cuda_fused.takes_routing(logits, bias, rule)
    expert, weight = fused.route_experts(logits, bias, rule)
    wanted, wanted_weight = reference_fused.route_experts(logits, bias, rule)
    assert expert.dtype == torch.int64 and weight.dtype == torch.float32
    other = expert != wanted
    # Sigmoids may differ in their last bit, and so may what they decide.
    choice = torch.sigmoid(logits.double()) + bias.double()
    gap = choice.gather(1, expert) - choice.gather(1, wanted)
    assert gap[other].abs().le(1e-6).all() and other.double().mean() <= 1e-3
    torch.testing.assert_close(weight, wanted_weight, rtol=2e-6, atol=1e-7, equal_nan=True)


def check_routing_of_padding(fused: CudaFused, name: str) -> None:
    """Requests of some nodes each, one of them padding; live rows are routed as ever."""
    experts, rule = RULES[name]
    nodes = 5
    live = LiveRows(
        slot=torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=fused.device),
        num_nodes=torch.tensor([3, 5, 5, 1], dtype=torch.int32, device=fused.device),
        nodes=nodes,
    )
    logits, bias = (t.to(fused.device) for t in routing_inputs(4 * nodes, experts, "normal"))
    found = fused.route_experts(logits, bias, rule, live)
    for expert, weight in (found, reference_fused.route_experts(logits, bias, rule, live)):
        there = (expert >= 0).all(1).view(4, nodes)
        assert there.sum(1).tolist() == [3, 0, 5, 1] and there[0, :3].all() and there[3, 0]
        assert (expert[~there.view(-1)] == -1).all()
        assert (weight[~there.view(-1)] == 0).all()
        rows, whole = there.view(-1), fused.route_experts(logits, bias, rule)
        assert torch.equal(expert[rows], whole[0][rows])
        torch.testing.assert_close(weight[rows], whole[1][rows], rtol=2e-6, atol=1e-7)


def check_per_head(fused: CudaFused, rows: int, dtype: torch.dtype) -> None:
    """Into the first part of wider rows, whose rest stays as it is; and into new ones."""
    heads, inner, outer = 4, 16, 24
    x = drawn(rows, rows, heads, 2 * inner).to(fused.device, dtype)[..., :inner]
    weight = drawn(2, heads, inner, outer).to(fused.device, dtype)
    exact = torch.einsum("tha,hab->thb", x.double(), weight.double())
    wide = torch.full((rows, heads, outer + 8), 7.0, dtype=dtype, device=fused.device)
    close = 1e-5 if dtype == torch.float32 else 0.03
    for out in (wide[..., :outer], None):
        found = fused.per_head(x, weight, out)
        assert out is None or found.data_ptr() == wide.data_ptr()
        torch.testing.assert_close(found.double(), exact, rtol=close, atol=10 * close)
    assert wide[..., outer:].eq(7).all()
