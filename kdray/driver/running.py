"""Where every decoding request stands, on the device.

The host places a request once, and afterwards only its page table, as it grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.plan import RunningRows
from kdray.core.request import SamplingParams
from kdray.core.sampling import divisor_of
from kdray.kernels.page_tables import PageTables, upload
from kdray.kernels.round_ops import SlotState

Int32Array = NDArray[np.int32]

ROOT, ROOT_POSITION, TEMPERATURE, TOP_K = range(4)
TOP_P, MIN_P, SEED = range(3)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """A request that joins: its slot, its root with its place, and how it is drawn."""

    slot: int
    root: int
    root_position: int
    sampling: SamplingParams
    seed: int


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: whoever uses the engine may have chosen another since."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class RunningState:
    """S slots, and one more that stands for padding, as the page tables have them.

    small   [4, S + 1] int32: root, root position, temperature (float32 bits), top-k
    wide    [3, S + 1] int64: top-p, min-p (float64 bits), seed
    """

    def __init__(self, tables: PageTables) -> None:
        """tables: of these slots, written here alone."""
        slots, device = len(tables.table), tables.table.device
        self._tables = tables
        self._small = torch.zeros(4, slots, dtype=torch.int32, device=device)
        self._wide = torch.zeros(3, slots, dtype=torch.int64, device=device)
        self._wide[TOP_P] = _bits(1.0)

    @property
    def slots(self) -> SlotState:
        return SlotState(
            root=self._small[ROOT],
            root_position=self._small[ROOT_POSITION],
            page_table=self._tables.table,
            page_size=self._tables.page_size,
        )

    def rows(self, slot: Tensor) -> RunningRows:
        """The requests at slot [R] int32; below 0: a row of padding."""
        own = self._tables.own(slot)
        small, wide = self._small.index_select(1, own), self._wide.index_select(1, own)
        return RunningRows(
            slot=slot,
            root=small[ROOT],
            root_position=small[ROOT_POSITION],
            page_table=self._tables.table.index_select(0, own),
            page_size=self._tables.page_size,
            temperature=small[TEMPERATURE].view(torch.float32),
            top_k=small[TOP_K],
            top_p=wide[TOP_P].view(torch.float64),
            min_p=wide[MIN_P].view(torch.float64),
            seed=wide[SEED],
        )

    def place(self, joining: Sequence[Placement]) -> None:
        """Write what the host knows of new requests; in stream order, without waiting."""
        if not joining:
            return
        device = self._small.device
        slot = upload(np.array([p.slot for p in joining], dtype=np.int64), device)
        self._small.index_copy_(1, slot, upload(_small(joining), device))
        self._wide.index_copy_(1, slot, upload(_wide(joining), device))

    def place_pages(self, moved: Sequence[tuple[int, Int32Array]]) -> None:
        """New page tables of some slots."""
        self._tables.place(moved)


def _small(joining: Sequence[Placement]) -> Int32Array:
    heat = [divisor_of(p.sampling) for p in joining]
    table = np.empty((4, len(joining)), dtype=np.int32)
    table[ROOT] = [p.root for p in joining]
    table[ROOT_POSITION] = [p.root_position for p in joining]
    table[TEMPERATURE] = np.array(heat, dtype=np.float32).view(np.int32)
    table[TOP_K] = [p.sampling.top_k for p in joining]
    return table


def _wide(joining: Sequence[Placement]) -> NDArray[np.int64]:
    table = np.empty((3, len(joining)), dtype=np.int64)
    table[TOP_P] = [_bits(p.sampling.top_p) for p in joining]
    table[MIN_P] = [_bits(p.sampling.min_p) for p in joining]
    table[SEED] = [p.seed for p in joining]
    return table


def _bits(number: float) -> int:
    return int(np.float64(number).view(np.int64))
