"""What collectives take of a step: the same step on the same ranks, with them and without."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from step_rank import Rank
from step_ranks import Loopback
from step_rows import StepCase, seen_of, step_of
from step_time import distinct_experts, replayed, spans_ms
from torch import Tensor

from kdray.kernels.ops import Norm, Ops
from kdray.model.parallel import Collectives
from kdray.verifier.collectives import TorchCollectives


class Mutable(Collectives):
    """The ranks' collectives, which can be left out for a while, on all ranks alike.

    A step that is run or captured meanwhile sends nothing and waits for nobody; its numbers are
    those of one rank's part. What was captured before goes on sending.
    """

    def __init__(self, collectives: TorchCollectives, size: int) -> None:
        self._whole = collectives
        self._loopback = Loopback(size)
        self._now: Collectives = collectives

    @contextmanager
    def left_out(self) -> Iterator[None]:
        self._now = self._loopback
        try:
            yield
        finally:
            self._now = self._whole

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._now.all_reduce(x)

    def all_reduce_norm(
        self, partial: Tensor, x: Tensor, norm: Norm, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        return self._now.all_reduce_norm(partial, x, norm, ops)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._now.all_gather(x)

    def deal_rows(self, x: Tensor) -> Tensor:
        return self._now.deal_rows(x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._now.broadcast(x)

    def close(self) -> None:
        self._whole.close()


def travel(ms: Sequence[float], local_ms: Sequence[float]) -> dict[str, float | None]:
    """Of a step's times with collectives and without: what they take, waiting included."""
    whole, local = statistics.median(ms), statistics.median(local_ms)
    return {"travel_ms": whole - local, "travel_share": 1 - local / whole}


def local_step(
    collectives: Mutable, rank: Rank, case: StepCase, repeats: int
) -> tuple[list[float], float]:
    """Milliseconds of the case's step without collectives, and the experts a layer it chose."""
    with collectives.left_out():
        call = step_of(rank, case)
        with rank.ops.watch() as chosen:
            seen_of(rank, case, call)()
        distinct = distinct_experts(chosen)
        run = replayed(call, rank.device) if case.way == "tree" else call
        return spans_ms(run, rank.device, repeats), sum(distinct) / max(1, len(distinct))
