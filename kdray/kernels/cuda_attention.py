"""Launches verify_attention.cu: absorbed MLA over the paged latent cache with a draft tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.attention_table import AttentionPlan, plan_for
from kdray.kernels.loader import MAX_BLOCK_BYTES, NO_DEFINES, Kernel, KernelLoader
from kdray.kernels.nvrtc import Defines
from kdray.kernels.ops import AttentionBatch, DeviceAttentionBatch

# As in verify_attention.cu.
THREADS = 256
MAX_BLOCKS = 256
PART_ROWS = {torch.bfloat16: 72, torch.float32: 8}  # of a tile that several blocks share
ENTRIES = {torch.bfloat16: "verify_attention", torch.float32: "verify_attention_fp32"}
STEP_COST = {torch.bfloat16: 12, torch.float32: 1}  # the dearest step's, or more
PLAIN_LEAST_COST = 4  # float32: steps of 32 keys by 8 rows that another block is worth
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionRows:
    """Whose rows are whose, on the device: what a captured launch reads anew at every replay.

    Request r has rows row_start[r] .. row_start[r + 1]; the first num_known[r] + num_nodes[r] - 1
    of them are real and the others give 0. A request with num_known 0 has no real rows.

    row_start    [R + 1] int32         num_cached, num_known, num_nodes   [R] int32
    page_table   [R, P] int32          mask   [R, N, W] int32, as in AttentionBatch
    rows_cap     rows a request has at most; together with R it names the bucket of a graph
    """

    row_start: Tensor
    num_cached: Tensor
    num_known: Tensor
    num_nodes: Tensor
    page_table: Tensor
    page_size: int
    mask: Tensor
    rows_cap: int

    @classmethod
    def of(cls, batch: AttentionBatch, device: torch.device) -> AttentionRows:
        """One upload of the batch's host integers, from memory the copy need not wait for."""
        _check_reach(batch)
        starts, known = np.asarray(batch.row_start), np.asarray(batch.num_known)
        rows = np.diff(starts)
        host = np.concatenate([starts, batch.num_cached, known, rows - known + 1])
        pinned = torch.from_numpy(host.astype(np.int32))
        if device.type == "cuda":
            pinned = pinned.pin_memory()
        requests = len(rows)
        numbers = pinned.to(device, non_blocking=True)
        row_start, cached, known_on_device, nodes = numbers.split(
            [requests + 1, requests, requests, requests]
        )
        return cls(
            row_start=row_start,
            num_cached=cached,
            num_known=known_on_device,
            num_nodes=nodes,
            page_table=batch.page_table.contiguous(),
            page_size=batch.page_size,
            mask=batch.mask.contiguous(),
            rows_cap=int(rows.max(initial=0)),
        )

    @classmethod
    def of_device(cls, batch: DeviceAttentionBatch) -> AttentionRows:
        """Trees of one root and N nodes each; nothing is read back."""
        requests, nodes, _ = batch.mask.shape
        device = batch.mask.device
        return cls(
            row_start=nodes * torch.arange(requests + 1, dtype=torch.int32, device=device),
            num_cached=batch.num_cached.contiguous(),
            num_known=torch.ones(requests, dtype=torch.int32, device=device),
            num_nodes=batch.num_nodes.contiguous(),
            page_table=batch.page_table.contiguous(),
            page_size=batch.page_size,
            mask=batch.mask.contiguous(),
            rows_cap=nodes,
        )


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
        self._plan = plan
        self._variant = dict(variant)
        self._work: dict[tuple[torch.dtype, int], _Workspace] = {}
        # Every layer of a step attends alike: what the layers share is laid out once a batch.
        self._rows: WeakKeyDictionary[AttentionBatch | DeviceAttentionBatch, AttentionRows] = (
            WeakKeyDictionary()
        )

    def verify_attention(
        self,
        query: Tensor,
        cache: Tensor,
        batch: AttentionBatch | DeviceAttentionBatch,
        scale: float,
        latent_dim: int,
    ) -> Tensor:
        """As kernels.ops.Ops.verify_attention; raises KernelError for what `takes` denies."""
        rows = self._rows.get(batch)
        if rows is None:
            rows = self._rows[batch] = self._lay_out(batch)
        out = query.new_empty(*query.shape[:2], latent_dim)
        self.attend(out, query, cache, rows, scale)
        return out

    def attend(
        self, out: Tensor, query: Tensor, cache: Tensor, rows: AttentionRows, scale: float
    ) -> None:
        """query [T, H, C + D], cache [S, C + D] -> out [T, H, C], all of one dtype.

        May be captured: grid and workspace depend on R, rows_cap and H alone.
        """
        _check(out, query, cache, rows)
        requests, pages = rows.page_table.shape
        heads, latent_dim = query.shape[1], out.shape[2]
        if requests == 0 or query.shape[0] == 0:
            return
        plan = self._plan or self._plan_for(query.dtype, requests, rows.rows_cap * heads)
        work = self._workspace(query.dtype, latent_dim)
        kernel = self._kernel(query.dtype, latent_dim, query.shape[2] - latent_dim)
        kernel.launch(
            min(plan.blocks, work.blocks),
            THREADS,
            (
                *(out, work.value, work.norm, work.ticket, query, cache),
                *(rows.row_start, rows.num_cached, rows.num_known, rows.num_nodes),
                *(rows.page_table, rows.mask),
                *map(np.int64, (query.stride(0), query.stride(1), cache.stride(0))),
                *(requests, heads, pages, rows.page_size.bit_length() - 1),
                *(rows.mask.shape[1], rows.mask.shape[2]),
                np.float32(scale * LOG2_E),
                max(STEP_COST[query.dtype], plan.least_cost),
            ),
            shared_bytes=shared_bytes(query.dtype, latent_dim, query.shape[2] - latent_dim),
            cooperative=True,
        )

    def _plan_for(self, dtype: torch.dtype, requests: int, packed_rows: int) -> AttentionPlan:
        if dtype == torch.float32:
            return AttentionPlan(self._processors(), PLAIN_LEAST_COST)
        return plan_for(self._processors(), requests, packed_rows)

    def _lay_out(self, batch: AttentionBatch | DeviceAttentionBatch) -> AttentionRows:
        if isinstance(batch, DeviceAttentionBatch):
            return AttentionRows.of_device(batch)
        return AttentionRows.of(batch, self._loader.device)

    def _kernel(self, dtype: torch.dtype, latent_dim: int, rope_dim: int) -> Kernel:
        wished = defines(latent_dim, rope_dim) | self._variant
        return self._loader.get("verify_attention", ENTRIES[dtype], wished)

    def _workspace(self, dtype: torch.dtype, latent_dim: int) -> _Workspace:
        key = (dtype, latent_dim)
        if key not in self._work:
            blocks = self._plan.blocks if self._plan else self._processors()
            self._work[key] = _Workspace.empty(
                min(blocks, MAX_BLOCKS), PART_ROWS[dtype], latent_dim, self._loader.device
            )
        return self._work[key]

    def _processors(self) -> int:
        if self._loader.device.type != "cuda":
            return 3  # the kernel's source run on the CPU
        return torch.cuda.get_device_properties(self._loader.device).multi_processor_count


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

    @property
    def blocks(self) -> int:
        return self.ticket.shape[0]


def defines(latent_dim: int, rope_dim: int) -> dict[str, str | int]:
    """What verify_attention.cu is compiled with."""
    return {
        "LATENT": latent_dim,
        "ROPE": rope_dim,
        "SHARED_BYTES": shared_bytes(torch.bfloat16, latent_dim, rope_dim),
        "SHARED_BYTES_FP32": shared_bytes(torch.float32, latent_dim, rope_dim),
    }


def shared_bytes(dtype: torch.dtype, latent_dim: int, rope_dim: int) -> int:
    """Dynamic shared memory of a block: the ring and the queries are what depends on the sizes."""
    if dtype == torch.float32:
        width = latent_dim + rope_dim
        return _rounded(4 * (8 * width + 32 * (width + 4)) + 4 * (6 * 256 + 8) + 512, 128)
    ring = 4 * 16 * (2 * (latent_dim + rope_dim) + 16)
    scores = (2 * 4 * 3 + 4) * 32 * 16
    query_steps = latent_dim // 64 + -(-rope_dim // 64)
    extra_query = 4 * query_steps * 32 * 8
    return _rounded(ring + scores + extra_query + 64 * 16 * 2 + 1024, 128)


def takes(query: Tensor, cache: Tensor, page_size: int, latent_dim: int) -> bool:
    """Whether the kernel serves these; what it does not, the reference does."""
    rope_dim = query.shape[-1] - latent_dim
    fits = latent_dim % 64 == 0 and rope_dim > 0 and rope_dim % 16 == 0
    if query.dtype not in ENTRIES or cache.dtype != query.dtype or not fits:
        return False
    aligned = cache.data_ptr() % 16 == 0 and cache.stride(0) * cache.itemsize % 16 == 0
    strides = (query.data_ptr() // 2, query.stride(0), query.stride(1))
    aligned = aligned and (query.dtype == torch.float32 or not any(n % 2 for n in strides))
    whole = query.stride(-1) == 1 and cache.stride(-1) == 1
    small = shared_bytes(query.dtype, latent_dim, rope_dim) <= MAX_BLOCK_BYTES
    return aligned and whole and small and page_size & (page_size - 1) == 0


def _check(out: Tensor, query: Tensor, cache: Tensor, rows: AttentionRows) -> None:
    if not takes(query, cache, rows.page_size, out.shape[2]):
        raise KernelError(
            f"verify_attention takes no query {tuple(query.shape)} {query.dtype} with a cache of "
            f"{cache.dtype}, {out.shape[2]} latent dimensions and pages of {rows.page_size}: "
            "bfloat16 or float32, C a multiple of 64, D of 16, rows from 16-byte boundaries on, "
            "pages of a power of two"
        )
    numbers: Sequence[Tensor] = (
        *(rows.row_start, rows.num_cached, rows.num_known, rows.num_nodes),
        *(rows.page_table, rows.mask),
    )
    if any(number.dtype != torch.int32 for number in numbers):
        raise KernelError("row_start, lengths, page_table and mask are int32")
    if not all(tensor.is_contiguous() for tensor in (out, *numbers)) or out.data_ptr() % 16:
        raise KernelError("out, lengths, page_table and mask lie whole, out at 16 bytes")


def _check_reach(batch: AttentionBatch) -> None:
    reach = batch.page_table.shape[1] * batch.page_size
    rows = np.diff(batch.row_start)
    for r, last in enumerate(np.asarray(batch.num_cached) + rows):
        if last > reach:
            raise ValueError(
                f"request {r} reaches position {last - 1}, beyond its page table; "
                "reserve pages for known tokens and drafts before the step"
            )


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
