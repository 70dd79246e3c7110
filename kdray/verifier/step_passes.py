"""Steps from the host launched at once: the target's forward pass over a planned step's rows.

Launched kernel by kernel, a step of few rows takes a GPU less time than the host its launches. So
on GPUs the pass is recorded as a CUDA graph for some numbers of rows, whose inputs (rows, lengths,
pages, the trees' masks) lie in fixed places. All ranks choose alike, by the step's rows. Every row
attends to the latents themselves, however long its chunk: expanding them (kdray.model.mla) has
shapes that the host must know, and up to the rows of the largest pass it is no faster. What is
drafted, drawn and learnt the host launches as in any step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdray.core.buckets import pass_sizes
from kdray.core.tree import WORD_BITS
from kdray.kernels.attention_batch import AttentionBatch
from kdray.kernels.attention_rows import AttentionRows
from kdray.kernels.graphs import record
from kdray.kernels.ops import LiveRows
from kdray.kernels.page_tables import upload
from kdray.model.batch import ForwardBatch, TargetOutput
from kdray.model.target import TargetModel
from kdray.verifier.kv_cache import KVCache
from kdray.verifier.layout import StepLayout

TOKEN, POSITION, SLOT = range(3)


class StepPasses:
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
        most_nodes: int,
        pages: int,
        spare_slot: int,
    ) -> None:
        """requests: of a step at most; most_nodes, pages: of a request at most, roots counted;
        spare_slot: where padding writes."""
        device = cache.layers[0].device
        self.sizes = pass_sizes(prefill_chunk)
        self._model = model
        self._cache = cache
        self._requests = requests
        self._padding = torch.tensor([[0], [0], [spare_slot]], device=device)
        self._rows = self._padding.repeat(1, self.sizes[-1])
        # row_start [R + 1], num_cached [R], num_known [R], num_nodes [R], rows that are real
        self._lengths = torch.zeros(4 * requests + 2, dtype=torch.int32, device=device)
        words = -(-most_nodes // WORD_BITS)
        self._mask = torch.zeros(requests, most_nodes, words, dtype=torch.int32, device=device)
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
            self._write_lengths(size, [], [], [])
            self._replays[size] = record(partial(self._pass, size), pool)
        return torch.cuda.memory_reserved(device) - before

    def size_for(self, layout: StepLayout) -> int | None:
        """Rows of the pass that the step fits; None where none does."""
        if len(layout.plan.requests) > self._requests:
            return None
        return next((size for size in self.sizes if size >= layout.row_start[-1]), None)

    def run(self, size: int, layout: StepLayout) -> TargetOutput:
        """The layout's rows, in a pass of so many; enqueued behind whatever runs."""
        batch, requests, count = layout.batch, layout.plan.requests, layout.row_start[-1]
        assert isinstance(batch.attention, AttentionBatch), "a planned step's"
        rows = self._rows[:, :size]
        rows[:, :count] = torch.stack([batch.token, batch.position, batch.slot])
        rows[:, count:] = self._padding
        _put(self._page_table, batch.attention.page_table)
        self._mask.zero_()
        _put(self._mask, batch.attention.mask)
        cached = [request.num_cached for request in requests]
        known = [len(request.known) for request in requests]
        self._write_lengths(size, cached, known, layout.trees.num_nodes)
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
        slots = self._requests
        row_start, cached, known, nodes, real = self._lengths.split(
            [slots + 1, slots, slots, slots, 1]
        )
        batch = ForwardBatch(
            token=self._rows[TOKEN, :size],
            position=self._rows[POSITION, :size],
            slot=self._rows[SLOT, :size],
            attention=AttentionRows(
                row_start=row_start,
                num_cached=cached,
                num_known=known,
                num_nodes=nodes,
                page_table=self._page_table,
                page_size=self._cache.page_size,
                mask=self._mask,
                rows_cap=size,
            ),
            live=LiveRows(slot=torch.zeros_like(real), num_nodes=real, nodes=size),
        )
        self._outputs[size] = self._model.forward(batch, self._cache.layers)

    def _write_lengths(
        self, size: int, cached: Sequence[int], known: Sequence[int], nodes: Sequence[int]
    ) -> None:
        """Rows behind the real ones belong to a request without any, or to the last one's end."""
        count, slots = len(known), self._requests
        lengths = np.zeros(4 * slots + 2, dtype=np.int32)
        row_start = lengths[: slots + 1]
        row_start[:] = size
        row_start[: count + 1] = [0, *np.cumsum(np.add(known, nodes) - 1)]
        lengths[-1] = row_start[count]
        row_start[slots] = size
        for number, column in enumerate((cached, known, nodes)):
            first = slots + 1 + number * slots
            lengths[first : first + count] = column
        self._lengths.copy_(upload(lengths, self._lengths.device))


def _put(place: Tensor, values: Tensor) -> None:
    """Into the corner of a place that is as large or larger."""
    place[tuple(slice(0, length) for length in values.shape)] = values
