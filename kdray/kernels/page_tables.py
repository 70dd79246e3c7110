"""The running requests' page tables on a device, written by the host in stream order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32Array = NDArray[np.int32]


class PageTables:
    """S slots, and one more that stands for padding: its pages are all the spare page.

    table   [S + 1, P] int32
    """

    def __init__(
        self, *, slots: int, pages: int, page_size: int, spare_page: int, device: torch.device
    ) -> None:
        self.padding = slots
        self.page_size = page_size
        self.table = torch.full((slots + 1, pages), spare_page, dtype=torch.int32, device=device)
        self._spare_page = spare_page

    def own(self, slot: Tensor) -> Tensor:
        """Rows of the table [R] int64 for slots [R] int32; below 0: the padding's."""
        return torch.where(slot < 0, self.padding, slot).long()

    def place(self, moved: Sequence[tuple[int, Int32Array]]) -> None:
        """New tables of some slots, filled up with the spare page; nothing is waited for."""
        if not moved:
            return
        rows = np.full((len(moved), self.table.shape[1]), self._spare_page, dtype=np.int32)
        for row, (_, pages) in zip(rows, moved, strict=True):
            row[: len(pages)] = pages
        index = upload(np.array([slot for slot, _ in moved], dtype=np.int64), self.table.device)
        self.table.index_copy_(0, index, upload(rows, self.table.device))


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """To the device in stream order, through memory that the copy need not wait for."""
    host = torch.from_numpy(np.array(array))
    if device.type == "cuda":
        host = host.pin_memory()  # torch keeps the memory until the copy is done
    return host.to(device, non_blocking=True)
