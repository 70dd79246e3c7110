"""The paged latent cache of one rank."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """A row per token slot and layer: [latent | rotated rope key].

    layers   num_layers tensors [num_pages * page_size, width]

    Slots are never cleared: attention reads what the step's batch says is written, nothing else.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        rows = num_pages * page_size
        self.layers: list[Tensor] = [
            torch.zeros(rows, width, dtype=dtype, device=device) for _ in range(num_layers)
        ]

    @staticmethod
    def bytes_per_page(*, num_layers: int, page_size: int, width: int, dtype: torch.dtype) -> int:
        return num_layers * page_size * width * dtype.itemsize
