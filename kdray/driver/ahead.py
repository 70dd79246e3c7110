"""Steps that run ahead of the host: launched before the last one's tokens are known.

The host hands over which requests take part and how many drafts they want; where they stand is on
the device. Tokens come back one step late, through pinned memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.buckets import Buckets, BucketSize
from kdray.core.plan import RequestResult, RoundOrder
from kdray.core.request import Request
from kdray.driver.device_round import (
    BONUS,
    DEAD,
    FIRST_DRAFT,
    LENGTH,
    NUM_NODES,
    DeviceRound,
    RoundParts,
)
from kdray.driver.running import Placement
from kdray.driver.scheduler import AheadStep, held_slot

Int32Array = NDArray[np.int32]
Progress = Callable[[int, int], None]  # rounds captured, of how many
REPORTS = 3  # host copies: of the step in flight, of the one being read, and one to spare


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A step on its way: its report on the host, good once `arrived` (None: it is)."""

    step: AheadStep
    report: Tensor
    arrived: torch.cuda.Event | None


class AheadDecoder:
    """Launches device rounds for the scheduler's steps and reads their reports."""

    def __init__(self, parts: RoundParts, buckets: Buckets, candidates: int) -> None:
        """candidates: that count at every depth of a tree; 1 makes it a chain."""
        self._parts = parts
        self._buckets = buckets
        self._candidates = candidates
        self._device = parts.state.slots.root.device
        self._on_gpu = self._device.type == "cuda"
        self._rounds = {size: DeviceRound(parts, *size) for size in buckets.sizes()}
        self._last_inputs: dict[BucketSize, Int32Array] = {}
        self._placed: dict[int, tuple[Request, int]] = {}  # slot -> request and its preemptions
        self._tables: dict[int, Int32Array] = {}  # slot -> its page table on the device
        shape = (buckets.requests[-1], FIRST_DRAFT + parts.depth)
        self._reports = [
            torch.zeros(shape, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(REPORTS)
        ]
        self._launched = 0

    def capture(self, pool: Any, progress: Progress) -> int:
        """Record every round as a CUDA graph, largest first; returns the bytes this took."""
        before = torch.cuda.memory_reserved(self._device)
        gc.collect()  # what is freed on the device while a graph is recorded would break it
        for done, size in enumerate(self._buckets.sizes()):
            progress(done, len(self._rounds))
            self._rounds[size].capture(pool)
        progress(len(self._rounds), len(self._rounds))
        return torch.cuda.memory_reserved(self._device) - before

    def launch(self, step: AheadStep) -> InFlight:
        """Enqueue a step behind whatever runs."""
        size = self._buckets.choose(len(step.requests), 1 + max(step.budgets))
        chosen, inputs = self._rounds[size], self._inputs_of(size, step)
        moved = self._place(step)
        self._parts.verifiers.order_round(RoundOrder(size=size, slot=inputs[0], tables=moved))
        self._write_inputs(size, chosen, inputs)
        chosen.run()
        report = self._reports[self._launched % REPORTS][: len(step.requests)]
        self._launched += 1
        report.copy_(chosen.report[: len(step.requests)], non_blocking=True)
        arrived = None
        if self._on_gpu:
            arrived = torch.cuda.Event()
            arrived.record()
        return InFlight(step, report, arrived)

    def collect(self, flight: InFlight) -> list[RequestResult]:
        """Wait for a step; what every request of it gained."""
        if flight.arrived is not None:
            flight.arrived.synchronize()
        rows = flight.report.tolist()
        return [_result(*pair) for pair in zip(flight.step.requests, rows, strict=True)]

    def _place(self, step: AheadStep) -> tuple[tuple[int, Int32Array], ...]:
        """Tell the device who joined and whose pages have grown; the latter."""
        joining: list[Placement] = []
        moved: list[tuple[int, Int32Array]] = []
        for request, pages in zip(step.requests, step.pages, strict=True):
            slot = held_slot(request)
            if self._tables.get(slot) is pages:
                continue  # tables are replaced as they grow, and nobody else has this one
            placed = self._placed.get(slot)
            if placed is None or placed[0] is not request or placed[1] != request.num_preemptions:
                self._placed[slot] = (request, request.num_preemptions)
                joining.append(_placement(request))
            self._tables[slot] = pages
            moved.append((slot, pages))
        self._parts.state.place(joining)
        self._parts.state.place_pages(moved)
        return tuple(moved)

    def _inputs_of(self, size: BucketSize, step: AheadStep) -> Int32Array:
        """As DeviceRound.inputs."""
        inputs = np.zeros((3, size[0]), dtype=np.int32)
        inputs[0] = -1
        real = slice(len(step.requests))
        inputs[0, real] = [held_slot(request) for request in step.requests]
        inputs[1, real] = step.budgets
        inputs[2, real] = self._candidates
        return inputs

    def _write_inputs(self, size: BucketSize, chosen: DeviceRound, inputs: Int32Array) -> None:
        last = self._last_inputs.get(size)
        if last is not None and np.array_equal(last, inputs):
            return
        self._last_inputs[size] = inputs
        host = torch.from_numpy(inputs)
        chosen.inputs.copy_(host.pin_memory() if self._on_gpu else host, non_blocking=True)


def _placement(request: Request) -> Placement:
    return Placement(
        slot=held_slot(request),
        root=request.tokens[-1],
        root_position=request.num_cached,
        sampling=request.sampling,
        seed=request.seed,
    )


def _result(request: Request, row: Sequence[int]) -> RequestResult:
    drafts = row[FIRST_DRAFT : FIRST_DRAFT + row[LENGTH] - 1]
    return RequestResult(
        request_id=request.request_id,
        tokens=(*drafts, row[BONUS]),
        num_drafted=row[NUM_NODES] - 1,
        is_broken=bool(row[DEAD]),
    )
