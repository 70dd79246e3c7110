"""Random accepted paths over a paged cache, and where their rows must end up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.plan import AcceptedPaths


@dataclass(frozen=True, slots=True, eq=False)
class PagedPaths:
    """Paths of R requests whose slots are a choice of S, with pages none of them shares.

    slot             [R] int32, -1 for padding
    root_position    [S] int32
    page_table       [S, P] int32 over num_pages pages of page_size rows
    """

    paths: AcceptedPaths
    slot: Tensor
    root_position: Tensor
    page_table: Tensor
    page_size: int

    @property
    def num_rows(self) -> int:
        return self.page_table.numel() * self.page_size

    def moves(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and target rows of every accepted node that is not in place, one by one."""
        source, target = [], []
        for r, slot in enumerate(self.slot.tolist()):
            for k in range(1, int(self.paths.length[r])) if slot >= 0 else ():
                node = int(self.paths.node[r, k])
                if node != k:
                    source.append(self._row(slot, node))
                    target.append(self._row(slot, k))
        return np.array(source, dtype=np.int64), np.array(target, dtype=np.int64)

    def _row(self, slot: int, node: int) -> int:
        position = int(self.root_position[slot]) + node
        page = int(self.page_table[slot, position // self.page_size])
        return page * self.page_size + position % self.page_size


def random_paths(
    rng: np.random.Generator, *, requests: int, width: int, nodes: int, page_size: int
) -> PagedPaths:
    """Paths of 1 to `width` nodes of trees with `nodes` nodes, a third of them 0, 1, 2, .."""
    slots, context = requests + 3, 3 * page_size + 5
    pages = -(-(context + nodes) // page_size)
    length = rng.integers(1, min(width, nodes) + 1, requests)
    node = np.zeros((requests, width), dtype=np.int32)
    for r in range(requests):
        behind = np.sort(rng.choice(np.arange(1, nodes), length[r] - 1, replace=False))
        in_place = rng.random() < 1 / 3
        node[r, 1 : length[r]] = np.arange(1, length[r]) if in_place else behind
        node[r, length[r] :] = rng.integers(-(2**31), 2**31, width - length[r])  # means nothing
    slot = rng.permutation(slots)[:requests]
    slot[rng.random(requests) < 0.1] = -1
    return PagedPaths(
        paths=AcceptedPaths(
            node=_tensor(node), length=_tensor(length), bonus=_tensor(rng.integers(0, 9, requests))
        ),
        slot=_tensor(slot),
        root_position=_tensor(rng.integers(0, context, slots)),
        page_table=_tensor(rng.permutation(slots * pages).reshape(slots, pages)),
        page_size=page_size,
    )


def _tensor(array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
