"""Routed INT4 experts in torch: what moe_w4a16.cu and sort_rows.cu compute, expert by expert."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kdray.kernels.moe_layout import Int4, PackedExperts, unpack, unwoven


class SortedRows(NamedTuple):
    """tile [tiles, 4] int32: expert, pairs, first place in pair, 0; pair [P] int32, or fewer."""

    tile: Tensor
    pair: Tensor


def moe_w4a16(
    x: Tensor, expert: Tensor, weight: Tensor, experts: PackedExperts, shared: Tensor
) -> Tensor:
    """As in Ops; looks on the host for the rows of every expert."""
    partial = torch.zeros((*expert.shape, x.shape[1]), dtype=x.dtype, device=x.device)
    for number in expert[expert >= 0].unique().tolist():
        row, choice = (expert == number).nonzero(as_tuple=True)
        gate, up, down = weights_of(experts, number)
        rows = x[row].float()
        inner = F.silu(rows @ gate.T) * (rows @ up.T)
        partial[row, choice] = (inner.to(x.dtype).float() @ down.T).to(x.dtype)
    return ((partial.float() * weight[..., None]).sum(1) + shared).to(x.dtype)


def weights_of(experts: PackedExperts, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up [I, E], down [E, I] of an expert, float32: q * scale, which is exact there."""
    gate, up = unwoven(unpack(experts.gate_up[number]))
    return values(gate), values(up), values(unpack(experts.down[number]))


def values(weight: Int4) -> Tensor:
    """[.., out, in] float32."""
    return weight.q.float() * weight.scale.float().repeat_interleave(32, dim=-1)


def sort_rows(expert: Tensor, tile_rows: int) -> SortedRows:
    """expert [T, k]: pairs by expert, cut into tiles of up to tile_rows."""
    chosen = expert.flatten().tolist()
    there = [p for p, number in enumerate(chosen) if number >= 0]
    pair = sorted(there, key=lambda p: chosen[p])
    tile = []
    for number in sorted({chosen[p] for p in there}):
        count, first = chosen.count(number), sum(0 <= other < number for other in chosen)
        for done in range(0, count, tile_rows):
            tile.append((number, min(tile_rows, count - done), first + done, 0))
    return SortedRows(
        torch.tensor(tile, dtype=torch.int32).reshape(-1, 4), torch.tensor(pair, dtype=torch.int32)
    )
