"""Tensor-parallel ranks as threads of this process: the arithmetic of TP without processes."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.model.parallel import Collectives

_TIMEOUT_S = 60.0


class Meeting:
    """Where `size` threads lay down a tensor each and see all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._parts: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self._parts[rank] = x.clone()
        self._barrier.wait(_TIMEOUT_S)
        parts = [part for part in self._parts if part is not None]
        self._barrier.wait(_TIMEOUT_S)
        return parts

    def abort(self) -> None:
        """Somebody leaves: who waits now or later gets BrokenBarrierError."""
        self._barrier.abort()


@dataclass(frozen=True)
class ThreadCollectives(Collectives):
    meeting: Meeting
    rank: int

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=-1)

    def deal_rows(self, x: Tensor) -> Tensor:
        whole = torch.cat(self.meeting.exchange(self.rank, x), dim=-1)
        return whole.chunk(self.meeting.size)[self.rank].clone()

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self.meeting.exchange(self.rank, x)[0])


class QueueChannel:
    """Both ends of the control channel: messages in order to every other rank."""

    def __init__(self, size: int) -> None:
        self._queues: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(size)]

    def send(self, message: bytes) -> None:
        for waiting in self._queues[1:]:
            waiting.put(message)

    def close(self) -> None:
        return None

    def receiver(self, rank: int) -> QueueReceiver:
        return QueueReceiver(self._queues[rank])


@dataclass(frozen=True)
class QueueReceiver:
    waiting: queue.SimpleQueue[bytes]

    def receive(self) -> bytes:
        return self.waiting.get(timeout=_TIMEOUT_S)

    def close(self) -> None:
        return None
