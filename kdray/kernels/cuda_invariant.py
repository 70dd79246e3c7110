"""Launches plan_paths.cu and verify_attention_invariant.cu: tree attention with bits that no step
changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.attention_rows import AnyAttentionBatch, AttentionRows
from kdray.kernels.batch_plans import BatchPlans
from kdray.kernels.cuda_attention import LOG2_E
from kdray.kernels.loader import MAX_BLOCK_BYTES, KernelLoader, processors_of

EIGHT = 8  # heads of an item
SEGMENTS = 64  # as in the kernels' files, and so are the others
FIRST_SEGMENT = 128
CHUNK = 32
GROUP = 4
WARPS = 8
THREADS = 256
PLAN_THREADS = 128
LAUNCH_ITEMS = 128  # whose parts are 1 MB each of Kimi K2.6, 135 MB in all
BLOCKS_A_PROCESSOR = 2


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """What each of T rows sees, for all layers: as plan_paths.cu says.

    info [T, 4] int32, path [T, N] int32, unit [launches, 1 + 128 * 64] int32
    """

    info: Tensor
    path: Tensor
    unit: Tensor


class CudaInvariantAttention:
    """The op on one device. Its workspace serves one launch at a time: use it on one stream."""

    def __init__(self, loader: KernelLoader) -> None:
        self._loader = loader
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._laid_out = BatchPlans[Paths](loader.device)

    def verify_attention(
        self,
        query: Tensor,
        cache: Tensor,
        batch: AnyAttentionBatch,
        scale: float,
        latent_dim: int,
    ) -> Tensor:
        """As kernels.ops.Ops.verify_attention; raises KernelError for what `takes` denies.

        All calls for a batch have as many rows and heads.
        """
        out = query.new_empty(*query.shape[:2], latent_dim)
        if not takes(query, cache, batch.page_size, latent_dim):
            raise KernelError(
                f"verify_attention_invariant takes no query {tuple(query.shape)} {query.dtype} "
                f"with a cache of {cache.dtype}, {latent_dim} latent dimensions and pages of "
                f"{batch.page_size}: bfloat16, C a multiple of 64, D of 16, rows from 16-byte "
                "boundaries on, pages of a power of two"
            )
        rows, paths, planned = self._laid_out.of(
            batch, lambda rows: self.plan(rows, *query.shape[:2])
        )
        self.attend(out, query, cache, rows, paths, scale, planned=planned)
        return out

    def plan(self, rows: AttentionRows, num_rows: int, heads: int) -> Paths:
        """The paths of rows 0 .. num_rows - 1, and who shares keys; may be captured."""
        requests, nodes, words = rows.mask.shape
        a_row = items_of(heads)
        launches = -(-num_rows * a_row // LAUNCH_ITEMS)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=rows.row_start.device)

        paths = Paths(
            info=empty(num_rows, 4),
            path=empty(num_rows, max(nodes, 1)),
            unit=empty(launches, 1 + LAUNCH_ITEMS * SEGMENTS),
        )
        if num_rows and requests:
            self._loader.get("plan_paths", "plan_paths").launch(
                -(-num_rows // PLAN_THREADS),
                PLAN_THREADS,
                (
                    *(paths.info, paths.path, *rows.lengths, rows.mask),
                    *(num_rows, requests, rows.page_table.shape[1]),
                    *(rows.page_size.bit_length() - 1, nodes, words),
                ),
                overlap=True,
            )
            arguments = (paths.unit, paths.info, num_rows * a_row, a_row)
            self._loader.get("plan_paths", "plan_units").launch(
                launches, THREADS, arguments, overlap=True
            )
        return paths

    def attend(
        self,
        out: Tensor,
        query: Tensor,
        cache: Tensor,
        rows: AttentionRows,
        paths: Paths,
        scale: float,
        *,
        planned: bool = False,
    ) -> None:
        """query [T, H, C + D], cache [S, C + D] -> out [T, H, C], all bf16; may be captured.

        paths: of these rows and as many heads.
        planned: paths and page table were there before an earlier launch of `attend` began: they
        are read before the kernel in front has ended.
        """
        if rows.page_table.shape[0] == 0 or len(query) == 0:
            return
        heads, latent_dim = out.shape[1:]
        rope_dim = query.shape[2] - latent_dim
        wished = defines(latent_dim, rope_dim)
        name = "verify_attention_invariant"
        segments = self._loader.get(name, name, wished)
        merge = self._loader.get(name, "merge_invariant", wished)
        value, norm = self._workspace(latent_dim)
        items = len(query) * items_of(heads)
        most_blocks = BLOCKS_A_PROCESSOR * processors_of(self._loader.device)
        for first in range(0, items, LAUNCH_ITEMS):
            count = min(LAUNCH_ITEMS, items - first)
            segments.launch(
                min(most_blocks, count * SEGMENTS),
                THREADS,
                (
                    *(out, value, norm, paths.info, paths.path, paths.unit),
                    *(query, cache, rows.page_table),
                    *map(np.int64, (query.stride(0), query.stride(1), cache.stride(0))),
                    *(first, heads, rows.page_table.shape[1]),
                    *(rows.page_size.bit_length() - 1, paths.path.shape[1]),
                    *(np.float32(scale * LOG2_E), int(planned)),
                ),
                shared_bytes=shared_bytes(latent_dim, rope_dim),
                overlap=True,
            )
            merge.launch(
                (count, -(-latent_dim // (16 * WARPS))),
                THREADS,
                (out, value, norm, paths.info, first, heads),
                overlap=True,
            )

    def _workspace(self, latent_dim: int) -> tuple[Tensor, Tensor]:
        """Parts of segments on their way to merge_invariant, of all launches alike."""
        parts = self._parts.get(latent_dim)
        if parts is None:
            shape, device = (LAUNCH_ITEMS, SEGMENTS, EIGHT), self._loader.device
            parts = self._parts[latent_dim] = (
                torch.empty(*shape, latent_dim, device=device),
                torch.empty(*shape, 2, device=device),
            )
        return parts


def items_of(heads: int) -> int:
    """Of a row: eights of heads."""
    return -(-heads // EIGHT)


def workspace_bytes(latent_dim: int) -> int:
    """Of a device: what the parts of segments take."""
    return 4 * LAUNCH_ITEMS * SEGMENTS * EIGHT * (latent_dim + 2)


def defines(latent_dim: int, rope_dim: int) -> dict[str, str | int]:
    """What verify_attention_invariant.cu is compiled with."""
    return {
        "LATENT": latent_dim,
        "ROPE": rope_dim,
        "SHARED_BYTES": shared_bytes(latent_dim, rope_dim),
    }


def shared_bytes(latent_dim: int, rope_dim: int) -> int:
    """Dynamic shared memory of a block: a chunk of keys and the queries are nearly all of it."""
    stride = 2 * (latent_dim + rope_dim) + 16
    rows = GROUP * EIGHT
    a_row = stride + 4 * (CHUNK + 4) + 2 * CHUNK + 16 + 12
    whole = CHUNK * stride + rows * a_row + 4 * FIRST_SEGMENT
    return -(-whole // 128) * 128


def takes(query: Tensor, cache: Tensor, page_size: int, latent_dim: int) -> bool:
    rope_dim = query.shape[-1] - latent_dim
    if query.dtype != torch.bfloat16 or cache.dtype != torch.bfloat16:
        return False
    if not takes_sizes(latent_dim, rope_dim, page_size):
        return False
    strides: Sequence[int] = (*query.stride()[:2], cache.stride(0))
    starts = (query.data_ptr(), cache.data_ptr())
    aligned = not any(n % 8 for n in strides) and not any(at % 16 for at in starts)
    return aligned and query.stride(-1) == 1 and cache.stride(-1) == 1


def takes_sizes(latent_dim: int, rope_dim: int, page_size: int) -> bool:
    """The part of `takes` that a model and its cache decide."""
    if latent_dim % 64 or rope_dim <= 0 or rope_dim % 16 or page_size & (page_size - 1):
        return False
    return shared_bytes(latent_dim, rope_dim) <= MAX_BLOCK_BYTES
