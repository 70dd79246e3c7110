"""Launches all_reduce.cu and all_reduce_norm.cu: sums over ranks that read one another's memory.

For short messages, by themselves and with the residual add and the norm behind them in a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels import cuda_fused
from kdray.kernels.loader import KernelLoader
from kdray.kernels.ops import Norm

# As in rank_sums.cuh and the .cu files.
THREADS, BLOCKS, MAX_RANKS = 256, 80, 8
FLAG_BYTES = MAX_RANKS * BLOCKS * 4
VECTOR_BYTES = 16
HANDLE_BYTES = 64
MAX_NORM_ROWS = BLOCKS  # a block each
MAX_NORM_ITEMS = 4  # vectors a thread of all_reduce_norm holds
DTYPES = (torch.bfloat16, torch.float32)

Gather = Callable[[Tensor], Tensor]


def defines(dtype: torch.dtype) -> dict[str, str | int]:
    return {"INPUT_BF16": int(dtype == torch.bfloat16)}


def norm_defines(width: int, dtype: torch.dtype, ranks: int) -> dict[str, str | int]:
    return cuda_fused.norm_defines(width, dtype) | {"RANKS": ranks}


def grid(vectors: int) -> int:
    """Blocks of all_reduce: a vector a thread, as long as all of them can run at once."""
    return min(BLOCKS, -(-vectors // THREADS))


class OneShotReduce:
    """The ranks of one host, each with a region of memory that all others have opened.

    All ranks make the same calls in the same order, on one stream each; calls may be captured in
    CUDA graphs that all ranks replay alike.
    """

    def __init__(
        self, loader: KernelLoader, regions: Sequence[int], rank: int, capacity_bytes: int
    ) -> None:
        """regions: the ranks' addresses in this process, of region_bytes(capacity_bytes) each."""
        if not 1 < len(regions) <= MAX_RANKS:
            raise KernelError(f"all_reduce.cu serves 2 to {MAX_RANKS} ranks, not {len(regions)}")
        self._loader = loader
        self._rank = rank
        self._capacity = capacity_bytes // VECTOR_BYTES
        device = loader.device
        self._regions = torch.tensor(list(regions), dtype=torch.int64, device=device)
        self._sequence = torch.zeros(BLOCKS, dtype=torch.int32, device=device)

    def takes(self, x: Tensor) -> bool:
        size = x.numel() * x.itemsize
        whole = x.is_contiguous() and x.data_ptr() % VECTOR_BYTES == 0 == size % VECTOR_BYTES
        return whole and x.dtype in DTYPES and 0 < size <= self._capacity * VECTOR_BYTES

    def all_reduce(self, x: Tensor) -> Tensor:
        """x summed over the ranks in place, the same bits on all of them."""
        if not self.takes(x):
            raise KernelError(
                f"all_reduce takes no {tuple(x.shape)} of {x.dtype}: whole vectors of 16 bytes of "
                f"bfloat16 or float32, up to {self._capacity * VECTOR_BYTES} bytes"
            )
        kernel = self._loader.get("all_reduce", "all_reduce", defines(x.dtype))
        vectors = x.numel() * x.itemsize // VECTOR_BYTES
        sizes = (len(self._regions), vectors, self._capacity)
        arrays = (x, self._regions, self._sequence)
        kernel.launch(grid(vectors), THREADS, (*arrays, self._rank, *sizes))
        return x

    def takes_norm(self, part: Tensor, x: Tensor, norm: Norm) -> bool:
        few = part.dim() == 2 and len(part) <= MAX_NORM_ROWS and self.takes(part)
        alike = part.shape == x.shape and part.dtype == x.dtype and part.device == x.device
        if not few or not alike or not x.is_contiguous() or not cuda_fused.takes_norm(x, norm):
            return False
        vectors = x.shape[1] * x.itemsize // VECTOR_BYTES
        return vectors <= MAX_NORM_ITEMS * cuda_fused.MOST_NORM_THREADS

    def all_reduce_norm(self, part: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """CudaFused.add_rms_norm(x, all_reduce(part), norm) of rows [T, E], to the bit."""
        if not self.takes_norm(part, x, norm):
            raise KernelError(
                f"all_reduce_norm takes no {tuple(part.shape)} of {part.dtype} and "
                f"{tuple(x.shape)} of {x.dtype}: up to {MAX_NORM_ROWS} rows of whole vectors of 16 "
                f"bytes of bfloat16 or float32, {MAX_NORM_ITEMS} a thread"
            )
        defines = norm_defines(x.shape[1], x.dtype, len(self._regions))
        kernel = self._loader.get("all_reduce_norm", "all_reduce_norm", defines)
        out, total = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device).unbind()
        arrays = (out, total, x, part, norm.weight, norm.eps, self._regions, self._sequence)
        sizes = (self._rank, self._capacity)
        kernel.launch(len(x), int(defines["THREADS"]), (*arrays, *sizes), overlap=True)
        return total, out


class SharedRegions:
    """This rank's region, and the others' as opened here (CUDA IPC).

    close() gives the others' back. This rank's own (region_bytes) goes with its process: what
    another has still open must not be freed, and who fails cannot wait for the others.
    """

    def __init__(self, rank: int, capacity_bytes: int, gather: Gather) -> None:
        """gather: [1, 64] uint8 of every rank -> [ranks, 64], in rank order.

        Raises KernelError where a GPU cannot open another's memory.
        """
        import cupy

        runtime = cupy.cuda.runtime
        own: int = runtime.malloc(region_bytes(capacity_bytes))
        runtime.memset(own, 0, region_bytes(capacity_bytes))
        runtime.deviceSynchronize()
        handle = torch.frombuffer(bytearray(runtime.ipcGetMemHandle(own)), dtype=torch.uint8)
        handles = gather(handle[None])
        self._opened: dict[int, int] = {}
        try:
            for other, row in enumerate(handles):
                if other != rank:
                    self._opened[other] = runtime.ipcOpenMemHandle(bytes(row.tolist()))
        except runtime.CUDARuntimeError as error:
            self.close()
            raise KernelError(f"rank {rank} cannot open another GPU's memory: {error}") from error
        self.addresses = [self._opened.get(other, own) for other in range(len(handles))]

    def close(self) -> None:
        import cupy

        for address in self._opened.values():
            cupy.cuda.runtime.ipcCloseMemHandle(address)
        self._opened = {}


def region_bytes(capacity_bytes: int) -> int:
    """Flags, and two buffers."""
    return FLAG_BYTES + 2 * (capacity_bytes // VECTOR_BYTES) * VECTOR_BYTES
