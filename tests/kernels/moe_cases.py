"""Routed INT4 experts to compare with the reference: of any sizes, routed in any way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.kernels import cuda_moe, reference_moe
from kdray.kernels.cuda_moe import CudaMoe
from kdray.kernels.cuda_moe_many import TILE_ROWS, CudaMoeMany
from kdray.kernels.moe_layout import Int4, PackedExperts, pack, woven

DEVICE_ROUTINGS = ("random", "one expert", "neighbours", "few experts", "padding")


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A layer's experts and a step's rows, as Ops.moe_w4a16 takes them."""

    x: Tensor
    expert: Tensor
    weight: Tensor
    experts: PackedExperts
    shared: Tensor

    def rows(self, rows: Tensor) -> Case:
        columns = (t[rows].contiguous() for t in (self.x, self.expert, self.weight, self.shared))
        x, expert, weight, shared = columns
        return Case(x=x, expert=expert, weight=weight, experts=self.experts, shared=shared)

    def run(self, moe: CudaMoe) -> Tensor:
        assert cuda_moe.takes(self.x, self.expert, self.weight, self.experts, self.shared)
        return moe.moe_w4a16(self.x, self.expert, self.weight, self.experts, self.shared)

    def reference(self) -> Tensor:
        return reference_moe.moe_w4a16(self.x, self.expert, self.weight, self.experts, self.shared)


@dataclass(frozen=True, slots=True)
class Sizes:
    width: int
    inner: int
    experts: int
    top_k: int


def drawn_int4(*shape: int, device: torch.device) -> Int4:
    """Every nibble occurs; scales of either sign over a few powers of two."""
    q = torch.randint(-8, 8, shape, dtype=torch.int8, device=device)
    spread = torch.randn(*shape[:-1], shape[-1] // 32, device=device)
    return Int4(q, (spread.exp() * 0.02).to(torch.bfloat16))


def drawn_experts(sizes: Sizes, device: torch.device) -> PackedExperts:
    gate, up = (
        drawn_int4(sizes.experts, sizes.inner, sizes.width, device=device) for _ in range(2)
    )
    down = drawn_int4(sizes.experts, sizes.width, sizes.inner, device=device)
    return PackedExperts(pack(woven(gate, up)), pack(down))


def chosen(routing: str, rows: int, sizes: Sizes, device: torch.device) -> Tensor:
    """[T, k] distinct experts a row; of padding, that is all but every third row, none."""
    spread = torch.rand(rows, sizes.experts, device=device)
    if routing == "one expert":  # all rows visit it, in any place
        spread[:, sizes.experts // 2] += 1
    elif routing == "neighbours":
        spread = spread[:1] + torch.arange(rows, device=device)[:, None] % 2
    elif routing == "few experts":  # most have no rows
        spread[:, : -(sizes.top_k + 1)] -= 2
    order = spread.topk(sizes.top_k, dim=1).indices
    expert = order.gather(1, torch.rand(rows, sizes.top_k, device=device).argsort(dim=1))
    if routing == "padding":
        expert[torch.arange(rows, device=device) % 3 != 1] = -1
    return expert


def drawn_case(
    sizes: Sizes,
    rows: int,
    routing: str = "random",
    experts: PackedExperts | None = None,
    device: str | torch.device = "cpu",
) -> Case:
    device = torch.device(device)
    expert = chosen(routing, rows, sizes, device)
    return Case(
        x=torch.randn(rows, sizes.width, device=device).to(torch.bfloat16),
        expert=expert,
        weight=torch.rand(rows, sizes.top_k, device=device).mul(2).masked_fill(expert < 0, 0),
        experts=drawn_experts(sizes, device) if experts is None else experts,
        shared=torch.randn(rows, sizes.width, device=device).to(torch.bfloat16),
    )


def check(moe: CudaMoe, case: Case) -> None:
    found = case.run(moe)
    wanted = exact(case) if case.x.is_cpu else case.reference().double()
    error = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert found.dtype == case.x.dtype
    assert len(error) == 0 or error.max() < 0.01, f"row {int(error.argmax())}: {error.max():.4f}"
    assert not moe._ready.any(), "arrivals are left for the next launch"


def check_padding(moe: CudaMoe, case: Case) -> None:
    """Rows without experts get the shared expert's output, whatever memory held before."""
    torch.use_deterministic_algorithms(True)  # what is empty is filled with NaN
    try:
        assert case.x.new_empty(9).isnan().all()
        found = case.run(moe)
    finally:
        torch.use_deterministic_algorithms(False)
    padding = (case.expert < 0).all(1)
    assert padding.any() and torch.equal(found[padding], case.shared[padding])
    error = (found.double() - case.reference().double()).norm(dim=1) / found.double().norm(dim=1)
    assert error.max() < 0.01


def exact(case: Case) -> Tensor:
    """float64 throughout, pair by pair."""
    total = case.shared.double()
    for row, choice in torch.cartesian_prod(*map(torch.arange, case.expert.shape)).tolist():
        if case.expert[row, choice] < 0:
            continue
        weights = reference_moe.weights_of(case.experts, int(case.expert[row, choice]))
        gate, up, down = (w.double() for w in weights)
        x = case.x[row].double()
        inner = torch.nn.functional.silu(gate @ x) * (up @ x)
        total[row] += case.weight[row, choice].double() * (down @ inner)
    return total


def check_bits(moe: CudaMoe, case: Case, others: list[Tensor]) -> None:
    """A row has the same bits among any others."""
    whole = case.run(moe)
    for rows in others:
        alone = case.rows(rows).run(moe)
        assert torch.equal(alone.view(torch.int16), whole[rows].view(torch.int16)), rows


def check_sorting(moe: CudaMoe, expert: Tensor, num_experts: int, column_tiles: int) -> None:
    wanted = reference_moe.sort_rows(expert, 8 * column_tiles)
    found = moe.sort_rows(expert, num_experts, column_tiles)
    count = int(found.num_tiles)
    assert count == len(wanted.tile) <= len(found.tile)
    assert torch.equal(found.tile[:count].cpu(), wanted.tile)
    assert torch.equal(found.pair[: len(wanted.pair)].cpu(), wanted.pair)


def check_same_bits(moe: CudaMoe, other: CudaMoe, case: Case) -> None:
    assert torch.equal(case.run(moe).view(torch.int16), case.run(other).view(torch.int16))


def check_placing(moe: CudaMoeMany, expert: Tensor, num_experts: int) -> None:
    wanted = reference_moe.sort_rows(expert, TILE_ROWS)
    found = moe.sort_rows(expert, num_experts)
    count = int(found.num_tiles)
    assert count == len(wanted.tile) <= len(found.tile)
    packed = found.tile[:count].cpu().long() & 0xFFFFFFFF
    parts = (packed >> 22, (packed >> 16 & 63) + 1, packed & 0xFFFF, packed * 0)
    assert torch.equal(torch.stack(parts, dim=1), wanted.tile.long())
    pairs = len(wanted.pair)
    assert torch.equal(found.pair[:pairs].cpu(), wanted.pair)
    assert torch.equal(found.place.cpu()[wanted.pair.long()], torch.arange(pairs).int())
