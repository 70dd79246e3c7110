"""Launches sample_tokens.cu: one token a row of logits, drawn as core.sampling draws it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.request import SamplingParams
from kdray.core.sampling import History, adjusts, divisor_of, drops
from kdray.errors import KernelError
from kdray.kernels.loader import Kernel, KernelLoader
from kdray.kernels.ops import SamplingRows
from kdray.kernels.round_ops import Drawn, DrawRows

# As in sample_tokens.cu.
THREADS = 256
CUT_THREADS = 512
NEIGHBOURS = 4
MAX_VOCAB = 1 << 18
SCALE, ADD, BAN = 0, 1, 2

BLOCKS_A_PROCESSOR = 4  # blocks that keep every multiprocessor busy when rows are few
MAX_SPLITS = 32
TOKENS_A_BLOCK = 2048  # at least


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adjustments:
    """Changes to single logits, on the device: row, token, kind [n] int32, value [n] float32.

    Entries of one logit stand together, in the order in which they apply.
    """

    row: Tensor
    token: Tensor
    kind: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Winners:
    """The best of a part of each row: value [M, P] float32 and id [M, P] int32 (global ids)."""

    value: Tensor
    id: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Maxima:
    """The largest logits: key [M, P] int64 with its token, value [M, P] float32."""

    key: Tensor
    value: Tensor


class CudaSampling:
    """The op on one device. It holds no state: every buffer belongs to its call."""

    def __init__(self, loader: KernelLoader) -> None:
        self._loader = loader
        self._device = loader.device
        on_gpu = self._device.type == "cuda"  # else: a kernel's source run on the CPU
        processors = (
            torch.cuda.get_device_properties(self._device).multi_processor_count if on_gpu else 1
        )
        self._wanted_blocks = BLOCKS_A_PROCESSOR * processors

    def sample_tokens(self, logits: Tensor, rows: SamplingRows) -> Drawn:
        """kernels.ops.Ops.sample_tokens; logits [M, V] float32 or bfloat16, left as they are."""
        changes = adjustments(rows, logits.shape[1], self._device)
        if changes is not None:
            logits = logits.to(torch.float32, copy=True)
            self.adjust_logits(logits, changes)
        return self.draw(logits, draw_rows(rows, self._device))

    def adjust_logits(self, logits: Tensor, changes: Adjustments, first_id: int = 0) -> None:
        """Apply penalties and bias in place; logits [M, V] float32, token first_id in column 0."""
        rows, vocab = _checked(logits).shape
        if logits.dtype != torch.float32:
            raise KernelError(f"adjusted logits are float32, not {logits.dtype}")
        entries = len(changes.row)
        columns = (changes.row, changes.token, changes.kind, changes.value)
        sizes = (np.int64(logits.stride(0)), rows, vocab, entries, first_id)
        if entries:
            kernel = self._kernel("adjust_logits", logits)
            kernel.launch(-(-entries // THREADS), THREADS, (logits, *columns, *sizes), overlap=True)

    def draw(self, logits: Tensor, rows: DrawRows) -> Drawn:
        """One token a row; nothing waits for the host."""
        maxima = self.row_maxima(logits)
        cut = self.find_cuts(logits, maxima.value, rows) if rows.drops else None
        return self.merge_winners(self.draw_winners(logits, rows, maxima, maxima.value, cut))

    def row_maxima(self, logits: Tensor) -> Maxima:
        """Of each of P parts of a row."""
        rows, vocab = _checked(logits).shape
        parts = self._splits(rows, vocab)
        key = logits.new_empty((rows, parts), dtype=torch.int64)
        value = torch.empty_like(key, dtype=torch.float32)
        if rows:
            kernel = self._kernel("row_maxima", logits)
            kernel.launch((rows, parts), THREADS, (key, value, *_rows(logits)), overlap=True)
        return Maxima(key=key, value=value)

    def find_cuts(self, logits: Tensor, maximum: Tensor, rows: DrawRows) -> Tensor:
        """The first place [M] int64 that top-k, top-p and min-p drop; for whole rows only."""
        cut = logits.new_empty(len(logits), dtype=torch.int64)
        filters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
        if len(logits):
            kernel = self._kernel("find_cuts", logits)
            data, stride, size = _rows(logits)
            args = (cut, maximum, data, *filters, stride, size, maximum.shape[1])
            kernel.launch(len(logits), CUT_THREADS, args, overlap=True)
        return cut

    def draw_winners(
        self,
        logits: Tensor,
        rows: DrawRows,
        maxima: Maxima,
        maximum: Tensor,
        cut: Tensor | None = None,
        first_id: int = 0,
    ) -> Winners:
        """The winner of each part of a row, or of a shard whose first column is token first_id.

        maxima    row_maxima of these logits
        maximum   [M, P'] float32: parts whose largest is the maximum of the whole row
        """
        if first_id % NEIGHBOURS:
            raise KernelError(f"a shard starts at a multiple of {NEIGHBOURS}, not at {first_id}")
        value = torch.empty_like(maxima.value)
        ids = torch.empty_like(value, dtype=torch.int32)
        address = (rows.temperature, rows.seed, rows.position)
        if len(logits):
            kernel = self._kernel("draw_tokens", logits)
            data, stride, size = _rows(logits)
            found = (value, ids, maxima.key, maximum, cut)
            sizes = (stride, size, maximum.shape[1], first_id)
            kernel.launch(
                tuple(value.shape), THREADS, (*found, data, *address, *sizes), overlap=True
            )
        return Winners(value=value, id=ids)

    def merge_winners(self, winners: Winners) -> Drawn:
        """The best of all parts, or of all shards' parts side by side; equal values: lowest id."""
        rows, parts = winners.value.shape
        token = torch.empty(rows, dtype=torch.int32, device=winners.value.device)
        dead = torch.empty_like(token)
        if rows:
            strides = (winners.value.stride(0), winners.value.stride(1))
            args = (token, dead, winners.value, winners.id, rows, parts, *strides)
            kernel = self._loader.get("sample_tokens", "merge_winners", defines(torch.float32))
            kernel.launch(-(-rows // THREADS), THREADS, args, overlap=True)
        return Drawn(token=token, dead=dead)

    def _splits(self, rows: int, vocab: int) -> int:
        wished = self._wanted_blocks // max(1, rows)
        return max(1, min(MAX_SPLITS, -(-vocab // TOKENS_A_BLOCK), wished))

    def _kernel(self, entry: str, logits: Tensor) -> Kernel:
        return self._loader.get("sample_tokens", entry, defines(logits.dtype))


def defines(dtype: torch.dtype) -> dict[str, str | int]:
    """What sample_tokens.cu is compiled with."""
    return {"INPUT_BF16": int(dtype == torch.bfloat16)}


def draw_rows(rows: SamplingRows, device: torch.device) -> DrawRows:
    """The rows' parameters, sent to the device."""
    params = rows.params

    def column(values: Sequence[float], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=dtype)).to(device, non_blocking=True)

    return DrawRows(
        temperature=column([divisor_of(p) for p in params], np.float32),
        top_k=column([p.top_k for p in params], np.int32),
        top_p=column([p.top_p for p in params], np.float64),
        min_p=column([p.min_p for p in params], np.float64),
        seed=column(rows.seed, np.int64),
        position=column(rows.position, np.int32),
        drops=any(p.temperature > 0.0 and drops(p) for p in params),
    )


def adjustments(rows: SamplingRows, vocab: int, device: torch.device) -> Adjustments | None:
    """core.sampling.adjust_logits as a list; None where it is empty."""
    found = [
        _entries(row, token, kind, value)
        for row, params in enumerate(rows.params)
        if adjusts(params)
        for token, kind, value in _row_changes(
            params, rows.history[row], rows.end_token_ids[row], vocab
        )
    ]
    if not found:
        return None
    entries = np.concatenate(found)
    order = np.lexsort((entries["token"], entries["row"]))  # stable: the order of a logit's stands
    entries = entries[order]
    columns = (
        torch.from_numpy(np.ascontiguousarray(entries[name])).to(device, non_blocking=True)
        for name in ENTRY.names or ()
    )
    row, token, kind, value = columns
    return Adjustments(row=row, token=token, kind=kind, value=value)


ENTRY = np.dtype([("row", "i4"), ("token", "i4"), ("kind", "i4"), ("value", "f4")])
Changes = tuple[NDArray[np.int64], int, NDArray[np.float32]]  # tokens, kind, values


def _entries(
    row: int, token: NDArray[np.int64], kind: int, value: NDArray[np.float32]
) -> NDArray[np.void]:
    entries = np.empty(len(token), ENTRY)
    entries["row"], entries["token"], entries["kind"], entries["value"] = row, token, kind, value
    return entries


def _row_changes(
    params: SamplingParams, history: History | None, end_token_ids: frozenset[int], vocab: int
) -> Iterator[Changes]:
    """The changes of one row in core's order: repetition, frequency, presence, bans, bias."""
    if params.uses_history:
        if history is None:
            raise ValueError("these params depend on the history; pass (prompt, output) tokens")
        prompt, output = history
        if params.repetition_penalty != 1.0:
            seen = _known((*prompt, *output), vocab)
            yield _same(np.unique(seen), SCALE, np.float32(params.repetition_penalty))
        token, count = np.unique(_known(output, vocab), return_counts=True)
        if params.frequency_penalty != 0.0:
            each = np.float32(params.frequency_penalty) * count.astype(np.float32)
            yield token, ADD, -each
        if params.presence_penalty != 0.0:
            yield _same(token, ADD, -np.float32(params.presence_penalty))
        if len(output) < params.min_tokens:
            banned = _known(sorted(end_token_ids), vocab)
            yield _same(banned, BAN, np.float32(0.0))
    for token_id, value in params.logit_bias:
        yield _same(_known([token_id], vocab), ADD, np.float32(value))


def _same(token: NDArray[np.int64], kind: int, value: np.float32) -> Changes:
    return token, kind, np.full(len(token), value, np.float32)


def _known(tokens: Sequence[int], vocab: int) -> NDArray[np.int64]:
    ids = np.asarray(tokens, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab)]


def _checked(logits: Tensor) -> Tensor:
    if logits.dtype not in (torch.float32, torch.bfloat16):
        raise KernelError(f"logits are bfloat16 or float32, not {logits.dtype}; cast them")
    if logits.ndim != 2 or not 0 < logits.shape[1] <= MAX_VOCAB:
        raise KernelError(
            f"logits must be [M, V] with V up to {MAX_VOCAB}, got {tuple(logits.shape)}"
        )
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise KernelError("a row of logits must lie in one piece; call contiguous()")
    return logits


def _rows(logits: Tensor) -> tuple[Tensor, np.int64, int]:
    """The kernels' logits, stride and size."""
    return logits, np.int64(logits.stride(0)), logits.shape[1]
