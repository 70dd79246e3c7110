"""Launches topk_logprob.cu: rows of logits to the K best tokens with fixed-point log-probs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.loader import NO_DEFINES, Argument, Kernel, KernelLoader
from kdray.kernels.nvrtc import Defines
from kdray.kernels.ops import PartialTopk

# As in topk_logprob.cu.
THREADS = 256
UNIT = 1024
SEGMENT = 8 * UNIT
MAX_VOCAB = 256 * UNIT
MAX_K = 64
MAX_PIECES = 32
MAX_PIECE_KEYS = 512
MAX_MERGED_KEYS = 1024

COMPILED_K = (8, 16, 32, 64)  # a launch takes the least that will do
DTYPES = (torch.bfloat16, torch.float32)
# Blocks that keep a multiprocessor busy, by an H200 at V = 163,840: with up to 3/4 row for each of
# them, and with more.
FEW_ROWS = 0.75
BLOCKS_A_PROCESSOR = 3
MORE_BLOCKS_A_PROCESSOR = 4.25
MAX_SHARED_ROWS = 1024  # blocks share rows up to this many; more keep the device busy undivided
MAX_KEYS = 1 << 18  # of the workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How the segments of all rows are dealt to blocks: topk_logprob.cu's pitch, run and grid."""

    pitch: int
    run: int
    blocks: int


class CudaTopk:
    """The op on one device. Its workspace serves one launch at a time: use it on one stream."""

    def __init__(self, loader: KernelLoader, variant: Defines = NO_DEFINES) -> None:
        """variant: further defines of topk_logprob.cu, for measuring."""
        self._loader = loader
        self._variant = dict(variant)
        device = loader.device
        self._processors = _processors(device)
        self._ticket = torch.zeros(MAX_SHARED_ROWS, dtype=torch.int32, device=device)
        self._keys = torch.empty(MAX_KEYS, dtype=torch.int64, device=device)
        self._units = torch.empty(
            MAX_SHARED_ROWS * MAX_VOCAB // UNIT, dtype=torch.int64, device=device
        )

    def topk_logprob(self, logits: Tensor, k: int, run: int | None = None) -> tuple[Tensor, Tensor]:
        """As kernels.ops.Ops.topk_logprob; logits [.., V] bfloat16 or float32, k <= 64.

        run   segments of SEGMENT logits a block; None: by the number of rows. It never changes the
              result, and is raised where a row would fall into too many pieces.
        """
        rows = _rows(logits, k)
        token = logits.new_empty((len(rows), k), dtype=torch.int32)
        score = torch.empty_like(token)
        if token.numel():
            self._launch("topk_logprob", (token, score), rows, k, run, ())
        shape = (*logits.shape[:-1], k)
        return token.view(shape), score.view(shape)

    def topk_partial(
        self, logits: Tensor, k: int, first_id: int, run: int | None = None
    ) -> PartialTopk:
        """The same of a shard [M, V'] whose first column is token first_id, still to be merged.

        Where every shard starts at a multiple of 1024, merging gives the unsharded result to the
        last bit; else the log-sum-exp may differ by float32 rounding.
        """
        rows = _rows(logits, k)
        value = logits.new_empty((len(rows), k), dtype=torch.float32)
        ids = torch.empty_like(value, dtype=torch.int32)
        mass = logits.new_empty((len(rows), 3), dtype=torch.int64)
        if value.numel():
            self._launch("topk_partial", (value, ids, mass), rows, k, run, (first_id,))
        return PartialTopk(value=value, id=ids, mass=mass)

    def merge_topk(self, value: Tensor, ids: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
        """Shards' PartialTopk stacked, [shards, M, k] twice and [shards, M, 3] -> token, score."""
        shards, rows, k = value.shape
        if shards * k > MAX_MERGED_KEYS:
            raise KernelError(f"{shards} shards of {k} candidates: {MAX_MERGED_KEYS} at most")
        token = torch.empty_like(ids[0])
        score = torch.empty_like(token)
        if token.numel():
            kernel = self._kernel("merge_topk", k, torch.float32)
            inputs = (value, ids, mass, shards, rows, k)
            kernel.launch(rows, THREADS, (token, score, *inputs), overlap=True)
        return token, score

    def _launch(
        self,
        entry: str,
        outputs: tuple[Tensor, ...],
        rows: Tensor,
        k: int,
        run: int | None,
        more: tuple[int, ...],
    ) -> None:
        vocab = rows.shape[1]
        deal = deal_segments(len(rows), _segments(vocab), _compiled_k(k), self._processors, run)
        work = (self._ticket, self._keys, self._units)
        sizes = (np.int64(rows.stride(0)), len(rows), vocab, deal.pitch, deal.run, k)
        kernel = self._kernel(entry, k, rows.dtype)
        args: tuple[Argument, ...] = (*outputs, *work, rows, *sizes, *more)
        kernel.launch(deal.blocks, THREADS, args, overlap=True)

    def _kernel(self, entry: str, k: int, dtype: torch.dtype) -> Kernel:
        return self._loader.get("topk_logprob", entry, self._defines(k, dtype))

    def _defines(self, k: int, dtype: torch.dtype) -> dict[str, str | int]:
        return defines(k, dtype) | self._variant


def deal_segments(
    rows: int, segments: int, keys: int, processors: int, run: int | None = None
) -> Deal:
    """How many blocks share a row; by default no block works on two rows.

    segments   of a row
    keys       that a block keeps of a row
    run        the segments of a block, where they are prescribed: then a block may end one row and
               start another. Measured, that evens out the load and is slower all the same, as every
               piece of a row pays for a first bound and a last ranking.
    """
    if rows > MAX_SHARED_ROWS:
        return Deal(pitch=segments, run=segments, blocks=rows)
    pieces = min(MAX_PIECES, MAX_PIECE_KEYS // keys)
    if run is None:
        few = rows <= FEW_ROWS * processors
        wanted = int(processors * (BLOCKS_A_PROCESSOR if few else MORE_BLOCKS_A_PROCESSOR))
        sharers = max(1, min(pieces, segments, wanted // rows, MAX_KEYS // keys // rows - 1))
        run = -(-segments // sharers)
        blocks = -(-segments // run)
        return Deal(pitch=blocks * run, run=run, blocks=rows * blocks)
    total = rows * segments
    run = max(
        run,
        -(-(segments - 1) // (pieces - 1)),  # a row that starts within a block has one piece more
        -(-total // (MAX_KEYS // keys - rows)),
    )
    return Deal(pitch=segments, run=run, blocks=-(-total // run))


def defines(k: int, dtype: torch.dtype) -> dict[str, str | int]:
    """What topk_logprob.cu is compiled with."""
    keys, is_bf16 = _compiled_k(k), dtype == torch.bfloat16
    resident = 3 if keys > 32 else 5 if is_bf16 else 4  # what fits without a spill
    return {"K": keys, "INPUT_BF16": int(is_bf16), "BLOCKS_PER_SM": resident}


def _compiled_k(k: int) -> int:
    return next(size for size in COMPILED_K if k <= size)


def _segments(vocab: int) -> int:
    return -(-vocab // SEGMENT)


def _rows(logits: Tensor, k: int) -> Tensor:
    """[M, V] with neighbouring columns; raises KernelError for what the kernel does not take."""
    if logits.dtype not in DTYPES:
        raise KernelError(f"logits are bfloat16 or float32, not {logits.dtype}; cast them")
    vocab = logits.shape[-1]
    if not 0 < vocab <= MAX_VOCAB or not 0 <= k <= MAX_K:
        raise KernelError(
            f"V = {vocab}, k = {k}: topk_logprob takes 1 to {MAX_VOCAB} tokens and k up to {MAX_K}"
        )
    rows = logits.reshape(-1, vocab)
    return rows if rows.stride(1) == 1 or vocab == 1 else rows.contiguous()


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # a kernel's source run on the CPU
    return torch.cuda.get_device_properties(device).multi_processor_count
