"""Launches of a CUfunction with attributes that CuPy does not take (cuLaunchKernelEx).

overlap       Programmatic dependent launch: the grid may start while the one before it on the
              stream still runs, and waits for its memory in start_behind_previous() (overlap.cuh).
              Graph capture keeps it, as a programmatic edge.
cooperative   All blocks of the grid are resident at once, or the launch fails: blocks may wait for
              one another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from kdray.errors import KernelError

Extent = int | tuple[int, ...]
CELL_BYTES = 8


class Function:
    """One entry point; launched from one thread at a time."""

    def __init__(self, pointer: int, device: int) -> None:
        """pointer: the CUfunction's; device: the number of the GPU it is loaded on."""
        self._pointer = pointer
        self._device = device
        self._configs: dict[tuple[bool, bool], Any] = {}

    def enqueue(
        self,
        grid: Extent,
        block: Extent,
        cells: Sequence[int],
        *,
        shared_bytes: int,
        stream: int,
        overlap: bool,
        cooperative: bool,
    ) -> None:
        """Launch on a stream, given as its address.

        cells   the parameters, each as an unsigned 64-bit integer whose low bytes are its own

        Raises KernelError with the driver's word for what was wrong.
        """
        from cuda.bindings import driver

        config = self._configs.get((overlap, cooperative))
        if config is None:
            config = self._configs[overlap, cooperative] = _config(overlap, cooperative)
        config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
        config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
        config.sharedMemBytes = shared_bytes
        config.hStream = stream
        values = (ctypes.c_uint64 * len(cells))(*cells)
        start = ctypes.addressof(values)
        places = range(start, start + CELL_BYTES * len(cells), CELL_BYTES)
        pointers = (ctypes.c_uint64 * len(cells))(*places)
        where = ctypes.addressof(pointers)
        (status,) = driver.cuLaunchKernelEx(config, self._pointer, where, 0)
        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            self._enter_context()
            (status,) = driver.cuLaunchKernelEx(config, self._pointer, where, 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"the launch failed: {status.name}, grid {grid}, block {block}")

    def _enter_context(self) -> None:
        """Make the device's context current; a thread new to CUDA has none."""
        from cuda.bindings import driver

        status, context = driver.cuDevicePrimaryCtxRetain(driver.CUdevice(self._device))
        if status == driver.CUresult.CUDA_SUCCESS:
            (status,) = driver.cuCtxSetCurrent(context)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"GPU {self._device} has no context: {status.name}")


def _config(overlap: bool, cooperative: bool) -> Any:
    from cuda.bindings import driver

    ids = driver.CUlaunchAttributeID
    attributes = []
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    config = driver.CUlaunchConfig()
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def _three(extent: Extent) -> tuple[int, int, int]:
    if isinstance(extent, int):
        return extent, 1, 1
    x, y, z = (*extent, 1, 1)[:3]
    return x, y, z
