"""What a rank of dummy weights lacks where it runs alone: text in its caches, the others' rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from kdray.kernels.ops import Ops, PartialTopk
from kdray.model.dummy_weights import Noise
from kdray.model.target import TargetModel
from kdray.model.target_tables import SplitTables, TargetTables

FAR_ROWS = 0.25  # what the head's rows of other ranks are multiplied by (see whole_tables)


def whole_tables(target: TargetModel, folder: Path) -> TargetTables:
    """Embedding and head of the whole vocabulary, which a drafter reads on rank 0.

    In the head the rows of other ranks are made smaller: the drafter's best tokens are then rank
    0's own, which it can embed without the others; another rank's token would be a row of zeros
    where sums are looped back, and all such rows would choose the same experts.
    """
    if target.shard.size == 1:
        return TargetTables.shared(target)
    tables = TargetTables.read(folder, target.head.dtype, target.head.device, "dummy")
    own = target.shard.slice_of(target.config.vocab_size)
    for others in (tables.head[: own.start], tables.head[own.stop :]):
        others.mul_(FAR_ROWS)
    return tables


class LonelyTables(SplitTables):
    """Tables of a rank whose collectives are looped back: the other parts' best, which would be its
    own once more, count for nothing."""

    def parts(self, hidden: Tensor, k: int, ops: Ops) -> PartialTopk:
        parts = super().parts(hidden, k, ops)
        return PartialTopk(value=parts.value[:1], id=parts.id[:1], mass=parts.mass[:1])


def fill(caches: Sequence[Tensor], noise: Noise) -> None:
    """Caches of numbers as if text had been read; those of bytes (fp8) keep their zeros."""
    for layer, cache in enumerate(caches):
        if cache.is_floating_point():
            flat = cache.view(-1)
            for first in range(0, len(flat), noise.num_numbers):
                part = flat[first : first + noise.num_numbers]
                part.copy_(noise.normal.run(f"cache.{layer}.{first}", len(part)))
