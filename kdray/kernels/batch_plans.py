"""What all layers of a step share of a batch of verify_attention: its rows, and their plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from kdray.kernels.attention_batch import AttentionBatch
from kdray.kernels.attention_rows import AnyAttentionBatch, AttentionRows

Plan = TypeVar("Plan")


class BatchPlans(Generic[Plan]):
    """Each made once, for as long as its batch lives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # None: the batch is the rows, which a value must not keep alive.
        self._known: WeakKeyDictionary[AnyAttentionBatch, tuple[AttentionRows | None, Plan]] = (
            WeakKeyDictionary()
        )

    def __len__(self) -> int:
        return len(self._known)

    def of(
        self, batch: AnyAttentionBatch, make: Callable[[AttentionRows], Plan]
    ) -> tuple[AttentionRows, Plan, bool]:
        """The batch's rows on the device, their plan, and whether both were there before."""
        known = self._known.get(batch)
        if known is None:
            rows = self._rows_of(batch)
            plan = make(rows)
            self._known[batch] = (None if rows is batch else rows), plan
            return rows, plan, False
        held, plan = known
        if held is None:
            assert isinstance(batch, AttentionRows)
            held = batch
        return held, plan, True

    def _rows_of(self, batch: AnyAttentionBatch) -> AttentionRows:
        if isinstance(batch, AttentionRows):
            return batch
        if isinstance(batch, AttentionBatch):
            return AttentionRows.of(batch, self._device)
        return AttentionRows.of_device(batch)
