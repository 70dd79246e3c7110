"""From a .cu file to a launch on torch's current stream.

NVRTC compiles (nvrtc.py), the disk remembers (cubin_cache.py), CuPy loads, launch.py launches.
Importing this module touches neither CUDA nor CuPy. Under graph capture a kernel must have been
fetched (get) before the capture starts: fetching loads a module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.cubin_cache import CubinCache
from kdray.kernels.launch import Extent, Function
from kdray.kernels.nvrtc import Cubin, Defines, EntryUsage, compile_cubin, read_source

__all__ = ["Argument", "Cubin", "EntryUsage", "Extent", "Kernel", "KernelLoader", "compile_cubin"]

Argument = Tensor | np.generic | int | None

MAX_BLOCK_BYTES = 99 * 1024  # shared memory a block may have on every architecture served
NO_DEFINES: Mapping[str, str | int] = {}


class Kernel:
    """One entry point, loaded on one device."""

    def __init__(self, entry: Any, device: torch.device) -> None:
        self._entry = entry  # cupy.RawKernel
        self._function = Function(entry.kernel.ptr, device.index)
        self._device = device
        self._granted = 0

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
        """Enqueue on torch's current stream of the device.

        args   tensors give their address, None a null pointer, an int is an int32; NumPy scalars
               pass as they are (float32, int64, uint64, ..). Tensors must live until the work is
               enqueued; torch's allocator keeps the order after that.
        overlap, cooperative   as launch.py says
        """
        if shared_bytes > self._granted:
            self._grant(shared_bytes)
        cells = [_cell(argument) for argument in args]
        with _device_of(self._device):
            self._function.enqueue(
                grid,
                block,
                cells,
                shared_bytes=shared_bytes,
                stream=torch.cuda.current_stream().cuda_stream,
                overlap=overlap,
                cooperative=cooperative,
            )

    def _grant(self, shared_bytes: int) -> None:
        """Ask for dynamic shared memory beyond the default of 48 KB, once a size."""
        whole = shared_bytes + self._entry.shared_size_bytes
        if whole > MAX_BLOCK_BYTES:
            raise KernelError(
                f"a block would take {whole} bytes of shared memory and has {MAX_BLOCK_BYTES}"
            )
        with _device_of(self._device):
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


def processors_of(device: torch.device) -> int:
    """Multiprocessors; a few where the kernels' source is run on the CPU."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def _device_of(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device current; free where it is already."""
    if torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def _cell(argument: Argument) -> int:
    """An argument's bytes as CUDA reads them, in the low end of 64 bits."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if argument is None:
        return 0
    if isinstance(argument, np.generic):
        return int.from_bytes(argument.tobytes(), sys.byteorder)
    if isinstance(argument, bool) or not isinstance(argument, int):
        raise TypeError(f"cannot pass {argument!r} to a kernel; wrap it in a NumPy scalar")
    if not -(2**31) <= argument < 2**31:
        raise OverflowError(f"{argument} is no int32; wrap it in a NumPy scalar of its own type")
    return argument & 0xFFFFFFFF
