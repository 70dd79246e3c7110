"""Steps of prompts launched at once: the target's forward pass over known tokens, of some sizes.

Launched kernel by kernel, a step of few rows takes a GPU less time than the host its launches. So
on GPUs the pass is recorded as a CUDA graph for some numbers of rows, whose inputs (rows, lengths,
pages) lie in fixed places. All ranks choose alike, by the plan. Every row attends to the latents
themselves, however long its chunk: expanding them (kdray.model.mla) has shapes that the host must
know, and up to the rows of the largest pass it is no faster. What is drawn, and what the drafter
learns, the host launches as in any step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from kdray.core.buckets import prompt_sizes
from kdray.core.plan import StepPlan
from kdray.kernels.attention_batch import DevicePromptBatch
from kdray.kernels.graphs import record
from kdray.kernels.ops import LiveRows
from kdray.kernels.page_tables import upload
from kdray.model.batch import ForwardBatch, TargetOutput
from kdray.model.target import TargetModel
from kdray.verifier.kv_cache import KVCache
from kdray.verifier.layout import StepLayout

TOKEN, POSITION, SLOT = range(3)


class PromptPasses:
    """The passes of one rank over its shard and cache.

    A pass's output is good until the next one begins.
    """

    def __init__(
        self,
        model: TargetModel,
        cache: KVCache,
        *,
        prefill_chunk: int,
        requests: int,
        pages: int,
        spare_slot: int,
    ) -> None:
        """requests: of a step at most; pages: of a request at most; spare_slot: where padding
        writes."""
        device = cache.layers[0].device
        self.sizes = prompt_sizes(prefill_chunk)
        self._model = model
        self._cache = cache
        self._requests = requests
        self._padding = torch.tensor([[0], [0], [spare_slot]], device=device)
        self._rows = self._padding.repeat(1, self.sizes[-1])
        # row_start [R + 1], num_cached [R], num_known [R], rows that are real
        self._lengths = torch.zeros(3 * requests + 2, dtype=torch.int32, device=device)
        self._page_table = torch.zeros(requests, pages, dtype=torch.int32, device=device)
        self._outputs: dict[int, TargetOutput] = {}
        self._replays: dict[int, Callable[[], None]] = {}

    def capture(self, pool: Any) -> int:
        """Record every size as a CUDA graph, largest first, while all other ranks do so; returns
        the bytes this took. Graphs recorded in the pool later leave the outputs alone."""
        device = self._rows.device
        before = torch.cuda.memory_reserved(device)
        gc.collect()  # what is freed on the device while a graph is recorded would break it
        for size in reversed(self.sizes):
            self._write_lengths(size, [], [])
            self._replays[size] = record(partial(self._pass, size), pool)
        return torch.cuda.memory_reserved(device) - before

    def size_for(self, plan: StepPlan) -> int | None:
        """Rows of the pass that the plan's step fits; None where none does."""
        if plan.max_budget > 0 or len(plan.requests) > self._requests:
            return None
        rows = sum(len(request.known) for request in plan.requests)
        return next((size for size in self.sizes if size >= rows), None)

    def run(self, size: int, layout: StepLayout) -> TargetOutput:
        """The layout's rows, in a pass of so many; enqueued behind whatever runs."""
        batch, requests, count = layout.batch, layout.plan.requests, layout.row_start[-1]
        rows = self._rows[:, :size]
        rows[:, :count] = torch.stack([batch.token, batch.position, batch.slot])
        rows[:, count:] = self._padding
        pages = batch.attention.page_table
        self._page_table[: len(pages), : pages.shape[1]] = pages
        known = [len(request.known) for request in requests]
        self._write_lengths(size, [request.num_cached for request in requests], known)
        replay = self._replays.get(size)
        if replay is None:
            self._pass(size)
        else:
            replay()
        output = self._outputs[size]
        return TargetOutput(hidden=output.hidden[:count], features=output.features[:count])

    @torch.inference_mode()
    def _pass(self, size: int) -> None:
        """The forward pass, from inputs to outputs in fixed places."""
        row_start, cached, known, real = self._lengths.split(
            [self._requests + 1, self._requests, self._requests, 1]
        )
        batch = ForwardBatch(
            token=self._rows[TOKEN, :size],
            position=self._rows[POSITION, :size],
            slot=self._rows[SLOT, :size],
            attention=DevicePromptBatch(
                row_start=row_start,
                num_cached=cached,
                num_known=known,
                page_table=self._page_table,
                page_size=self._cache.page_size,
                num_rows=size,
            ),
            live=LiveRows(slot=torch.zeros_like(real), num_nodes=real, nodes=size),
        )
        self._outputs[size] = self._model.forward(batch, self._cache.layers)

    def _write_lengths(self, size: int, cached: list[int], known: list[int]) -> None:
        """Rows behind the real ones belong to a request without any, or to the last one's end."""
        count, slots = len(known), self._requests
        lengths = np.zeros(3 * slots + 2, dtype=np.int32)
        row_start, rest = lengths[: slots + 1], lengths[slots + 1 :]
        row_start[:] = size
        row_start[: count + 1] = [0, *np.cumsum(known)]
        row_start[slots] = size
        rest[:count] = cached
        rest[slots : slots + count] = known
        rest[-1] = sum(known)
        self._lengths.copy_(upload(lengths, self._lengths.device))
