"""Which part of the model a rank holds, and how ranks add and join their parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kdray.kernels.ops import Norm, Ops


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` tensor-parallel ranks."""

    rank: int = 0
    size: int = 1

    def slice_of(self, total: int) -> slice:
        """This rank's contiguous part of `total` rows or columns; size must divide total."""
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


class Collectives(Protocol):
    """What the forward pass needs of the other ranks. Every rank makes the same calls in order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, every rank getting the same bits; may work in place."""
        ...

    def all_reduce_norm(
        self, partial: Tensor, x: Tensor, norm: Norm, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """x + the sum of `partial` over ranks [.., E], and the norm of that; may overwrite
        `partial`. Whoever knows a shorter way has the same bits by it."""
        return ops.add_rms_norm(x, self.all_reduce(partial), norm)

    def all_gather(self, x: Tensor) -> Tensor:
        """Join the ranks' parts along the last dimension, in rank order."""
        ...

    def deal_rows(self, x: Tensor) -> Tensor:
        """Trade columns for rows: of x [M, C] on every rank, each gets M / ranks rows whole.

        Rank r gets rows r * M / ranks on, [M / ranks, ranks * C], columns in rank order; ranks must
        divide M. Every number travels once, where all_gather sends it to every rank.
        """
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor on every rank; the others pass one of the same shape to be filled."""
        ...


class SoloCollectives(Collectives):
    """One rank: nothing to do."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def deal_rows(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x
