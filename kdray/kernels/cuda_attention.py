"""Launches verify_attention.cu: absorbed MLA over the paged latent cache with a draft tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels import latent_rows
from kdray.kernels.attention_rows import AnyAttentionBatch, AttentionRows
from kdray.kernels.attention_table import SHAPES, AttentionPlan
from kdray.kernels.batch_plans import BatchPlans
from kdray.kernels.cuda_plan import MAX_BLOCKS, AttentionPlanner, AttentionSchedule
from kdray.kernels.loader import MAX_BLOCK_BYTES, NO_DEFINES, Kernel, KernelLoader
from kdray.kernels.nvrtc import Defines

LOG2_E = math.log2(math.e)


class CudaAttention:
    """The op on one device. Its workspace serves one launch at a time: use it on one stream."""

    def __init__(
        self,
        loader: KernelLoader,
        *,
        plan: AttentionPlan | None = None,
        variant: Defines = NO_DEFINES,
    ) -> None:
        """plan: instead of the table's; variant: further defines of the kernel, for measuring."""
        self._loader = loader
        self._planner = AttentionPlanner(loader, plan)
        self._variant = dict(variant)
        self._work: dict[tuple[torch.dtype, int], _Workspace] = {}
        self._laid_out = BatchPlans[AttentionSchedule](loader.device)

    def verify_attention(
        self,
        query: Tensor,
        cache: Tensor,
        batch: AnyAttentionBatch,
        scale: float,
        latent_dim: int,
    ) -> Tensor:
        """As kernels.ops.Ops.verify_attention; raises KernelError for what `takes` denies.

        All calls for a batch have as many heads, in one dtype.
        """
        out = query.new_empty(*query.shape[:2], latent_dim)

        def plan(rows: AttentionRows) -> AttentionSchedule:
            _check(out, query, cache, rows)
            return self.schedule(rows, query.dtype, query.shape[1])

        rows, schedule, planned = self._laid_out.of(batch, plan)
        self.attend(out, query, cache, rows, schedule, scale, planned=planned)
        return out

    def schedule(self, rows: AttentionRows, dtype: torch.dtype, heads: int) -> AttentionSchedule:
        """Who does what of these rows in `attend`; may be captured."""
        return self._planner.schedule(rows, dtype, heads)

    def attend(
        self,
        out: Tensor,
        query: Tensor,
        cache: Tensor,
        rows: AttentionRows,
        schedule: AttentionSchedule,
        scale: float,
        *,
        planned: bool = False,
    ) -> None:
        """query [T, H, C + D], cache [S, C + D] -> out [T, H, C], all of one dtype.

        cache: may have rows in fp8 where the others are bfloat16 (latent_rows.py).
        schedule: of these rows, for as many heads and this dtype. May be captured.
        planned: the schedule and what it is of were there before an earlier launch of `attend`
        began, and so were the cache's rows before the batch's: the kernel reads them before the one
        in front of it has ended.
        """
        _check(out, query, cache, rows)
        requests, pages = rows.page_table.shape
        heads, latent_dim = query.shape[1], out.shape[2]
        if requests == 0 or query.shape[0] == 0:
            return
        shape, rope_dim = SHAPES[query.dtype], query.shape[2] - latent_dim
        fp8 = latent_rows.is_fp8(cache)
        work = self._workspace(query.dtype, latent_dim, schedule.blocks)
        self._kernel(query.dtype, latent_dim, rope_dim, fp8).launch(
            schedule.blocks,
            shape.threads,
            (
                *(out, work.value, work.norm, work.ticket, schedule.piece, schedule.start),
                *(query, cache, *rows.lengths, rows.page_table, rows.mask),
                *map(np.int64, (query.stride(0), query.stride(1), cache.stride(0))),
                *(requests, heads, pages, rows.page_size.bit_length() - 1),
                *(rows.mask.shape[1], rows.mask.shape[2]),
                *(np.float32(scale * LOG2_E), int(planned)),
            ),
            shared_bytes=shared_bytes(query.dtype, latent_dim, rope_dim, fp8),
            overlap=True,
        )

    def _kernel(self, dtype: torch.dtype, latent_dim: int, rope_dim: int, fp8: bool) -> Kernel:
        wished = defines(latent_dim, rope_dim, fp8) | self._variant
        return self._loader.get("verify_attention", SHAPES[dtype].entry, wished)

    def _workspace(self, dtype: torch.dtype, latent_dim: int, blocks: int) -> _Workspace:
        """Of all launches alike: for as many blocks as any of them has."""
        key = (dtype, latent_dim)
        if key not in self._work:
            most = max(blocks, self._planner.most_blocks)
            self._work[key] = _Workspace.empty(
                most, SHAPES[dtype].tile_rows, latent_dim, self._loader.device
            )
        return self._work[key]


@dataclass(frozen=True, slots=True, eq=False)
class _Workspace:
    """Parts of tiles on their way from the blocks that made them to those that merge them."""

    value: Tensor
    norm: Tensor
    ticket: Tensor

    @classmethod
    def empty(cls, blocks: int, rows: int, latent_dim: int, device: torch.device) -> _Workspace:
        return cls(
            value=torch.empty(2 * blocks, rows, latent_dim, device=device),
            norm=torch.empty(2 * blocks, rows, 2, device=device),
            ticket=torch.zeros(blocks, dtype=torch.int32, device=device),
        )


def defines(latent_dim: int, rope_dim: int, fp8: bool = False) -> dict[str, str | int]:
    """What verify_attention.cu is compiled with."""
    found: dict[str, str | int] = {
        "LATENT": latent_dim,
        "ROPE": rope_dim,
        "SHARED_BYTES": shared_bytes(torch.bfloat16, latent_dim, rope_dim, fp8),
        "SHARED_BYTES_FP32": shared_bytes(torch.float32, latent_dim, rope_dim),
    }
    return found | ({"KV_FP8": 1} if fp8 else {})


def shared_bytes(dtype: torch.dtype, latent_dim: int, rope_dim: int, fp8: bool = False) -> int:
    """Dynamic shared memory of a block: the ring and the queries are what depends on the sizes."""
    if dtype == torch.float32:
        width = latent_dim + rope_dim
        scratch = 16 * (256 + 8 * MAX_BLOCKS // 2)
        return _rounded(4 * 8 * width + max(4 * 32 * (width + 4), scratch) + 512, 128)
    steps = (latent_dim + rope_dim) // 16
    slots = 6 if latent_dim + rope_dim <= 320 else 5 if fp8 else 3
    between = 2 * (latent_dim + rope_dim) + 16
    if fp8:
        between = latent_rows.row_bytes(latent_dim, rope_dim)
    ring = max(slots * 16 * between, 40 * 1024)
    of_3, of_2 = (32 * (max(0, steps - kept) // 2 * 2) + 16 for kept in (10 if fp8 else 12, 26))
    return _rounded(ring + 24 * of_3 + 3 * 16 * of_2 + 2 * 80 * 16 * 2 + 2560, 128)


def takes(query: Tensor, cache: Tensor, page_size: int, latent_dim: int) -> bool:
    """Whether the kernel serves these; what it does not, the reference does."""
    rope_dim = query.shape[-1] - latent_dim
    fp8 = latent_rows.is_fp8(cache)
    if fp8:
        fits = cache.shape[1] == latent_rows.row_bytes(latent_dim, rope_dim)
    else:
        fits = cache.dtype == query.dtype
    if not fits or not takes_sizes(query.dtype, latent_dim, rope_dim, page_size, fp8):
        return False
    aligned = cache.data_ptr() % 16 == 0 and cache.stride(0) * cache.itemsize % 16 == 0
    strides = (query.data_ptr() // 2, query.stride(0), query.stride(1))
    aligned = aligned and (query.dtype == torch.float32 or not any(n % 2 for n in strides))
    return aligned and query.stride(-1) == 1 and cache.stride(-1) == 1


def takes_sizes(
    dtype: torch.dtype, latent_dim: int, rope_dim: int, page_size: int, fp8: bool
) -> bool:
    """The part of `takes` that a model and its cache decide."""
    if dtype not in SHAPES or (fp8 and dtype != torch.bfloat16):
        return False
    if latent_dim % 64 or rope_dim <= 0 or rope_dim % 16 or page_size & (page_size - 1):
        return False
    return shared_bytes(dtype, latent_dim, rope_dim, fp8) <= MAX_BLOCK_BYTES


def _check(out: Tensor, query: Tensor, cache: Tensor, rows: AttentionRows) -> None:
    if not takes(query, cache, rows.page_size, out.shape[2]):
        raise KernelError(
            f"verify_attention takes no query {tuple(query.shape)} {query.dtype} with a cache of "
            f"{cache.dtype}, {out.shape[2]} latent dimensions and pages of {rows.page_size}: "
            "bfloat16 or float32, C a multiple of 64, D of 16, rows from 16-byte boundaries on, "
            "pages of a power of two"
        )
    numbers: Sequence[Tensor] = (*(*rows.lengths, rows.page_table, rows.mask),)
    if any(number.dtype != torch.int32 for number in numbers):
        raise KernelError("row_start, lengths, page_table and mask are int32")
    if not all(tensor.is_contiguous() for tensor in (out, *numbers)) or out.data_ptr() % 16:
        raise KernelError("out, lengths, page_table and mask lie whole, out at 16 bytes")


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
