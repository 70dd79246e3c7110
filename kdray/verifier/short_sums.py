"""Sums of short messages by ranks that read one another's memory, where that is faster than NCCL.

Those of few rows do the residual add and the norm behind them in the same launch, where that is
faster than the faster of both sums with a launch behind it. Decided by a measurement when the ranks
have met, and by all alike: rank 0's word counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.errors import KernelError, LinkError
from kdray.kernels.cuda_fused import CudaFused
from kdray.kernels.cuda_reduce import MAX_RANKS, VECTOR_BYTES, OneShotReduce, SharedRegions
from kdray.kernels.loader import KernelLoader
from kdray.kernels.ops import Norm
from kdray.model.layers import RmsNorm
from kdray.model.parallel import Collectives, Shard
from kdray.verifier.links import reaches_peers
from kdray.verifier.sum_times import Way, first_wins, times_us

CAPACITY_BYTES = 1 << 20
SIZES = tuple(1 << power for power in range(14, 21))  # bytes: from one row of Kimi's to 73
NORM_ROWS = (1, 2, 4, 8, 16, 32, 64)  # with the norm behind them: more are not taken
NORM_WIDTH = 7168  # Kimi's and DeepSeek's, in bf16; wider rows are not taken
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShortSums:
    """reduce   for messages of at most limit_bytes, and for up to norm_rows rows with a norm behind
    them; regions must outlive it"""

    reduce: OneShotReduce
    regions: SharedRegions
    limit_bytes: int
    norm_rows: int

    def takes(self, x: Tensor) -> bool:
        return x.numel() * x.itemsize <= self.limit_bytes and self.reduce.takes(x)

    def takes_pieces(self, x: Tensor) -> bool:
        """Whether reduce_pieces does, which adds as `reduce` does: in the ranks' order."""
        whole = x.is_contiguous() and x.numel() * x.itemsize % VECTOR_BYTES == 0
        return whole and self.reduce.takes(x.view(-1)[: CAPACITY_BYTES // x.itemsize])

    def reduce_pieces(self, x: Tensor) -> Tensor:
        """x of any length, in place."""
        for piece in x.view(-1).split(CAPACITY_BYTES // x.itemsize):
            self.reduce.all_reduce(piece)
        return x

    def takes_norm(self, part: Tensor, x: Tensor, norm: Norm) -> bool:
        narrow = part.shape[-1] * part.itemsize <= NORM_WIDTH * torch.bfloat16.itemsize
        few = len(part) <= self.norm_rows
        return few and narrow and self.reduce.takes_norm(part, x, norm)


def open_short_sums(
    collectives: Collectives, shard: Shard, device: torch.device, *, always: bool = False
) -> ShortSums | None:
    """None where the ranks cannot or may not read one another's memory, or nothing is faster by it.

    always: for sums that are slower by it, too.

    All ranks call it together. Raises LinkError where sums come wrong, KernelError where they have
    other bits with the norm in the same launch.
    """
    if not 1 < shard.size <= MAX_RANKS or not reaches_peers():
        return None
    regions = open_regions(collectives, shard, device, CAPACITY_BYTES)
    if regions is None:
        return None
    loader = KernelLoader(device)
    reduce = OneShotReduce(loader, regions.addresses, shard.rank, CAPACITY_BYTES)
    for size in (SIZES[0], SIZES[-1]):
        _check(reduce, shard, device, size)
    norms = _Norms(reduce, CudaFused(loader))
    for rows in (NORM_ROWS[0], NORM_ROWS[-1]):
        norms.check(shard, rows)
    limit = _limit(reduce, collectives, shard, device)
    norm_rows = _norm_rows(norms, collectives, shard)
    if always:
        limit = CAPACITY_BYTES
    if limit == norm_rows == 0:
        regions.close()
        return None
    return ShortSums(reduce=reduce, regions=regions, limit_bytes=limit, norm_rows=norm_rows)


def open_regions(
    collectives: Collectives, shard: Shard, device: torch.device, capacity_bytes: int
) -> SharedRegions | None:
    """Every rank's memory for OneShotReduce; None on all where one cannot open another's."""

    def gather(handle: Tensor) -> Tensor:
        joined = collectives.all_gather(handle.int().to(device))
        return joined.view(shard.size, -1).to(torch.uint8).cpu()

    regions: SharedRegions | None = None
    try:
        regions = SharedRegions(shard.rank, capacity_bytes, gather)
    except KernelError as error:
        _log.info("sums by NCCL alone: %s", error)
    failed = torch.tensor([float(regions is None)], device=device)
    if float(collectives.all_reduce(failed)) == 0:
        return regions
    if regions is not None:
        regions.close()
    return None


def _check(reduce: OneShotReduce, shard: Shard, device: torch.device, size: int) -> None:
    place = torch.arange(size // 4, device=device) % 509
    for turn in range(4):
        got = reduce.all_reduce((place * (shard.rank + turn + 1)).float())
        factor = sum(rank + turn + 1 for rank in range(shard.size))
        if not torch.equal(got, (place * factor).float()):
            raise LinkError(f"rank {shard.rank} got a wrong sum over the GPUs' shared memory")


class _Norms:
    """Sums of a few rows with a norm behind them, in one launch and in two, beside rows of a
    residual stream."""

    def __init__(self, reduce: OneShotReduce, fused: CudaFused) -> None:
        self.reduce = reduce
        self._fused = fused
        self.device = fused.device
        place = torch.arange(NORM_ROWS[-1] * NORM_WIDTH, device=self.device)
        x = ((place * 31 + 1) % 8191 - 4095).float() / 512
        self._x = x.to(torch.bfloat16).view(-1, NORM_WIDTH)
        self._norm = RmsNorm.of(self._x[0].clone(), 1e-6)

    def in_one(self, part: Tensor) -> tuple[Tensor, Tensor]:
        return self.reduce.all_reduce_norm(part, self._x[: len(part)], self._norm)

    def behind(self, total: Tensor) -> tuple[Tensor, Tensor]:
        return self._fused.add_rms_norm(self._x[: len(total)], total, self._norm)

    def check(self, shard: Shard, rows: int) -> None:
        """Both have the same bits, or KernelError: of links that bring the sums all right."""
        for turn in range(4):
            part = self._x[:rows].roll(shard.rank + shard.size * turn + 1, 1) / 3
            found = self.in_one(part)
            wanted = self.behind(self.reduce.all_reduce(part.clone()))
            if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
                raise KernelError(
                    f"all_reduce_norm is wrong on rank {shard.rank}: it has other bits than "
                    "all_reduce and rms_norm one after the other"
                )


def _limit(
    reduce: OneShotReduce, collectives: Collectives, shard: Shard, device: torch.device
) -> int:
    """The most bytes up to which short sums are faster at every size."""
    ways = (reduce.all_reduce, collectives.all_reduce)
    messages = [torch.zeros(size // 2, dtype=torch.bfloat16, device=device) for size in SIZES]
    times = times_us(ways, messages, collectives)
    limit = (0, *SIZES)[first_wins(times)]
    if shard.rank == 0:
        _log.info(
            "sums over the GPUs' memory up to %d KB; us with a kernel in front, NCCL's: %s",
            limit >> 10,
            _figures([f"{size >> 10} KB" for size in SIZES], times),
        )
    return limit


def _norm_rows(norms: _Norms, collectives: Collectives, shard: Shard) -> int:
    """The most rows up to which sum and norm are faster in one launch, at every count."""
    ways: tuple[Way, ...] = (
        norms.in_one,
        lambda part: norms.behind(norms.reduce.all_reduce(part)),
        lambda part: norms.behind(collectives.all_reduce(part)),
    )
    messages = [
        torch.zeros(rows, NORM_WIDTH, dtype=torch.bfloat16, device=norms.device)
        for rows in NORM_ROWS
    ]
    times = times_us(ways, messages, collectives)
    most = (0, *NORM_ROWS)[first_wins(times)]
    if shard.rank == 0:
        _log.info(
            "sums and norms in one launch up to %d rows; us with a kernel in front, of a sum over "
            "the GPUs' memory and of NCCL's with a launch behind it: %s",
            most,
            _figures([f"{rows} rows" for rows in NORM_ROWS], times),
        )
    return most


def _figures(names: Sequence[str], times: Sequence[Sequence[float]]) -> str:
    return ", ".join(
        f"{name} {' against '.join(f'{us:.1f}' for us in row)}"
        for name, row in zip(names, times, strict=True)
    )
