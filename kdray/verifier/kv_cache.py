"""The paged latent cache of one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from kdray.kernels.latent_rows import RowFormat

PADDING_BYTES = 16


class KVCache:
    """A row per token slot and layer: [latent | rotated rope key], as `row` says.

    layers   num_layers tensors [num_pages * page_size, row.width] of row.dtype
    rows     the same memory with what lies between the rows: contiguous, for moving rows whole

    On a GPU rows of 16-bit numbers lie 16 bytes apart (those in fp8 bring their padding), so that a
    page comes into a multiprocessor's shared memory in one copy with its rows in different banks
    (verify_attention_ring.cuh). Slots are never cleared: attention reads what the step's batch says
    is written, nothing else.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        row: RowFormat,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        size = (num_pages * page_size, row.width + padding(row.dtype, device))
        self.rows: list[Tensor] = [
            torch.zeros(size, dtype=row.dtype, device=device) for _ in range(num_layers)
        ]
        self.layers: list[Tensor] = [rows[:, : row.width] for rows in self.rows]

    @staticmethod
    def bytes_per_page(
        *, num_layers: int, page_size: int, row: RowFormat, device: torch.device
    ) -> int:
        width = row.width + padding(row.dtype, device)
        return num_layers * page_size * width * row.dtype.itemsize


def padding(dtype: torch.dtype, device: torch.device) -> int:
    """Numbers between two rows."""
    return PADDING_BYTES // 2 if device.type == "cuda" and dtype.itemsize == 2 else 0
