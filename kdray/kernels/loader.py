"""From a .cu file to a launch on torch's current stream.

NVRTC compiles (nvrtc.py), the disk remembers (cubin_cache.py), CuPy loads and launches. Importing
this module touches neither CUDA nor CuPy. Under graph capture a kernel must have been fetched (get)
before the capture starts: fetching loads a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.cubin_cache import CubinCache
from kdray.kernels.nvrtc import Cubin, Defines, EntryUsage, compile_cubin, read_source

__all__ = ["Argument", "Cubin", "EntryUsage", "Kernel", "KernelLoader", "compile_cubin"]

Argument = Tensor | np.generic | int | None
Extent = int | tuple[int, ...]

MAX_BLOCK_BYTES = 99 * 1024  # shared memory a block may have on every architecture served
NO_DEFINES: Mapping[str, str | int] = {}


@dataclass(frozen=True, slots=True)
class _Stream:
    """What CuPy asks of a stream."""

    ptr: int


class Kernel:
    """One entry point, loaded on one device."""

    def __init__(self, entry: Any, device: torch.device) -> None:
        self._entry = entry  # cupy.RawKernel
        self._function = entry.kernel  # resolved once: asking for it asks CUDA for the device
        self._device = device
        self._granted = 0

    def launch(
        self,
        grid: Extent,
        block: Extent,
        args: tuple[Argument, ...],
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Enqueue on torch's current stream of the device.

        args   tensors give their address, None a null pointer, an int is an int32; NumPy scalars
               pass as they are (float32, int64, uint64, ..). Tensors must live until the work is
               enqueued; torch's allocator keeps the order after that.
        """
        if torch.cuda.current_device() == self._device.index:
            self._enqueue(grid, block, args, shared_bytes)
        else:
            with torch.cuda.device(self._device):
                self._enqueue(grid, block, args, shared_bytes)

    def _enqueue(
        self, grid: Extent, block: Extent, args: tuple[Argument, ...], shared_bytes: int
    ) -> None:
        if shared_bytes > self._granted:
            self._grant(shared_bytes)
        self._function(
            _extent(grid),
            _extent(block),
            tuple([_scalar(argument) for argument in args]),
            shared_mem=shared_bytes,
            stream=_Stream(torch.cuda.current_stream().cuda_stream),
        )

    def _grant(self, shared_bytes: int) -> None:
        """Ask for dynamic shared memory beyond the default of 48 KB, once a size."""
        whole = shared_bytes + self._entry.shared_size_bytes
        if whole > MAX_BLOCK_BYTES:
            raise KernelError(
                f"a block would take {whole} bytes of shared memory and has {MAX_BLOCK_BYTES}"
            )
        self._entry.max_dynamic_shared_size_bytes = shared_bytes
        self._granted = shared_bytes


class KernelLoader:
    """The kernels of one CUDA device, each compiled and loaded at its first use."""

    def __init__(self, device: torch.device, cache: CubinCache | None = None) -> None:
        if device.type != "cuda":
            raise KernelError(f"kernels run on CUDA devices, not on {device}")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.arch = "sm_{}{}".format(*torch.cuda.get_device_capability(self.device))
        self._cache = cache or CubinCache()
        self._kernels: dict[tuple[str, str, tuple[tuple[str, str | int], ...]], Kernel] = {}

    def get(self, name: str, entry: str, defines: Defines = NO_DEFINES) -> Kernel:
        """Entry point `entry` of kdray/kernels/NAME.cu, compiled with -D for each define."""
        key = (name, entry, tuple(defines.items()))
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._load(name, entry, defines)
        return kernel

    def _load(self, name: str, entry: str, defines: Defines) -> Kernel:
        try:
            import cupy
        except ImportError as error:
            raise KernelError("CuPy is not installed: pip install 'kdray[cuda]'") from error
        path = self._cache.path(read_source(name, self.arch, defines))
        with torch.cuda.device(self.device):
            torch.cuda.init()
            module = cupy.RawModule(path=str(path))
            return Kernel(module.get_function(entry), self.device)


def _extent(size: Extent) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else size


def _scalar(argument: Argument) -> np.generic:
    """An argument as the bytes CUDA reads: CuPy would pass a Python int as 64 bits."""
    if isinstance(argument, Tensor):
        return np.uint64(argument.data_ptr())
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, np.generic):
        return argument
    if isinstance(argument, bool) or not isinstance(argument, int):
        raise TypeError(f"cannot pass {argument!r} to a kernel; wrap it in a NumPy scalar")
    return np.int32(argument)
