"""Collectives over torch.distributed: gloo on CPUs, NCCL on GPUs (short sums without it)."""

from __future__ import annotations

import gc
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kdray.errors import StartupError
from kdray.kernels.ops import Norm, Ops
from kdray.model.parallel import Collectives, Shard
from kdray.verifier.links import check_links
from kdray.verifier.short_sums import ShortSums, open_short_sums


class TorchCollectives(Collectives):
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
        self._shard = Shard(rank, size)
        self._size = size
        self._device = device
        self._short: ShortSums | None = None
        self._in_rank_order = False

    def prove(self, *, in_rank_order: bool = False) -> None:
        """Check every link, and find which sums are faster without NCCL; all ranks together.

        in_rank_order: from here on sums add the ranks' parts in their order, in float32, and round
        once, whatever their length: no number's bits depend on what is summed beside it.

        Raises LinkError (kdray.verifier.links).
        """
        check_links(self, self._shard, self._device)
        if self._device.type == "cuda":
            self._short = open_short_sums(self, self._shard, self._device, always=in_rank_order)
        self._in_rank_order = in_rank_order

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._short is not None and self._short.takes(x):
            return self._short.reduce.all_reduce(x)
        if self._in_rank_order:
            return self._sum_in_order(x)
        dist.all_reduce(x)
        return x

    def _sum_in_order(self, x: Tensor) -> Tensor:
        if self._short is not None and self._short.takes_pieces(x):
            return self._short.reduce_pieces(x)
        parts = [torch.empty_like(x) for _ in range(self._size)]
        dist.all_gather(parts, x.contiguous())
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def all_reduce_norm(
        self, partial: Tensor, x: Tensor, norm: Norm, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        if self._short is not None and self._short.takes_norm(partial, x, norm):
            return self._short.reduce.all_reduce_norm(partial, x, norm)
        return super().all_reduce_norm(partial, x, norm, ops)

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
        """Let go of CUDA graphs that were recorded with these first: NCCL's end waits for them."""
        gc.collect()  # a graph in a cycle is still there
        if self._short is not None:
            self._short.regions.close()
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
