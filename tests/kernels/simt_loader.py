"""A KernelLoader whose kernels run on the CPU: launchers and .cu files as they are, CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

from kdray.kernels.loader import Argument, Extent, KernelLoader
from tests.kernels.simt.kernel import SimtKernel


class SimtLoader:
    """Stands in for a KernelLoader; `seed` draws the order in which threads run.

    apart: its kernels may run while those of other loaders do, on another thread.
    """

    def __init__(self, seed: int = 0, *, apart: bool = False) -> None:
        self.device = torch.device("cpu")
        self._seed = seed
        self._apart = apart
        self._kernels: dict[tuple[str, tuple[tuple[str, str | int], ...]], SimtKernel] = {}

    def get(
        self, name: str, entry: str, defines: Mapping[str, str | int] | None = None
    ) -> SimtEntry:
        key = (name, tuple((defines or {}).items()))
        if key not in self._kernels:
            self._kernels[key] = SimtKernel(name, defines, apart=self._apart)
        return SimtEntry(self._kernels[key], entry, self._seed)


class SimtEntry:
    """One entry point, launched as a loader.Kernel is."""

    def __init__(self, kernel: SimtKernel, entry: str, seed: int) -> None:
        self._kernel = kernel
        self._entry = entry
        self._seed = seed

    def launch(
        self,
        grid: Extent,
        block: Extent,
        args: tuple[Argument, ...],
        *,
        shared_bytes: int = 0,
        overlap: bool = False,
        cooperative: bool = False,
    ) -> None:
        words = tuple(
            np.uint64(arg.data_ptr()) if isinstance(arg, torch.Tensor) else arg for arg in args
        )
        self._kernel.launch(self._entry, _sizes(grid), _sizes(block), words, seed=self._seed)


def simt_loader(seed: int = 0, *, apart: bool = False) -> KernelLoader:
    return cast("KernelLoader", SimtLoader(seed, apart=apart))


def _sizes(extent: Extent) -> tuple[int, ...]:
    return (extent,) if isinstance(extent, int) else extent
