"""Collectives over torch.distributed: gloo on CPUs, NCCL on GPUs, the same code."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kdray.errors import StartupError


class TorchCollectives:
    """One process group of all ranks, met through the store that rank 0 keeps open."""

    def __init__(
        self, *, rank: int, size: int, host: str, port: int, device: torch.device, timeout_s: float
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        try:
            store = TCPStore(host, port, is_master=False, timeout=timeout)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
        except RuntimeError as error:
            raise StartupError(
                f"rank {rank} of {size} could not meet the others at {host}:{port}: {error}"
            ) from error
        self._size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self._size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def deal_rows(self, x: Tensor) -> Tensor:
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x.contiguous())
        rows: Tensor = parts.unflatten(0, (self._size, -1)).transpose(0, 1).flatten(1)
        return rows

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def open_store(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """Rank 0's store on a port the system picks: no race between choosing and binding it."""
    store = TCPStore(
        host,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return store, store.port
