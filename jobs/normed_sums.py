"""Sums over ranks with a layer's residual add and norm behind them: in one launch and in two."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kdray.errors import LinkError
from kdray.kernels.cuda_reduce import MAX_NORM_ROWS, VECTOR_BYTES, OneShotReduce
from kdray.kernels.ops import Ops
from kdray.model.layers import RmsNorm

FUSED = "fused"
BEHIND = "_norm"  # behind the name of the way to sum

Sum = Callable[[Tensor], object]  # over the ranks, in place
NormedSum = Callable[[Tensor], tuple[Tensor, Tensor]]


def normed_sums(
    sums: Mapping[str, Sum], own: OneShotReduce | None, x: Tensor, ops: Ops
) -> dict[str, NormedSum]:
    """The ways that take such rows, by the names of their figures; none of many rows."""
    if len(x) > MAX_NORM_ROWS or x.shape[1] * x.itemsize % VECTOR_BYTES:
        return {}
    place = torch.arange(x.numel(), device=x.device).view(x.shape)
    stream = ((place * 37 + 5) % 8191 - 4095).float().div(512).to(x.dtype)
    norm = RmsNorm.of(stream[0].clone(), 1e-6)

    def behind(way: Sum) -> NormedSum:
        def run(part: Tensor) -> tuple[Tensor, Tensor]:
            way(part)
            return ops.add_rms_norm(stream, part, norm)

        return run

    ways = {f"{name}{BEHIND}": behind(way) for name, way in sums.items()}
    if own is not None and own.takes_norm(x, stream, norm):
        ways[FUSED] = lambda part: own.all_reduce_norm(part, stream, norm)
    return ways


def check_bits(ways: Mapping[str, NormedSum], own: str, front: Callable[[], Tensor]) -> None:
    """Raises LinkError where one launch has other bits than two by the kernel `own`; front: writes
    the message anew."""
    if FUSED not in ways:
        return
    pairs = zip(ways[FUSED](front()), ways[f"{own}{BEHIND}"](front()), strict=True)
    if not all(torch.equal(one, two) for one, two in pairs):
        raise LinkError("a sum and its norm in one launch have other bits than in two")
