"""A batch of verify_attention as its kernels read it: whose rows are whose, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kdray.kernels.attention_batch import AttentionBatch, DeviceAttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
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

    @property
    def lengths(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.row_start, self.num_cached, self.num_known, self.num_nodes

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


AnyAttentionBatch = AttentionBatch | DeviceAttentionBatch | AttentionRows


def _check_reach(batch: AttentionBatch) -> None:
    reach = batch.page_table.shape[1] * batch.page_size
    rows = np.diff(batch.row_start)
    for r, last in enumerate(np.asarray(batch.num_cached) + rows):
        if last > reach:
            raise ValueError(
                f"request {r} reaches position {last - 1}, beyond its page table; "
                "reserve pages for known tokens and drafts before the step"
            )
