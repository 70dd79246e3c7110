"""A checkpoint's tensors on the device of a rank, by fixed staging buffers whatever their size."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from kdray.cards import host_bytes
from kdray.model.checkpoint import (
    BLOCK_BYTES,
    Checkpoint,
    Cut,
    Part,
    fill,
    keep_columns,
    refuse_broken_numbers,
)
from kdray.model.stored import ShardFile

# What stays in the page cache behind a reading rank: at least so much, and this part of the host's
# memory. Ranks read columns of the same rows at about the same time, and should find them there,
# though one be some seconds ahead; more would push out what others have in memory.
LEAST_BEHIND_BYTES = 4 << 30
BEHIND_PART = 16
BUFFERS = 2  # of a thread: one is filled while the other is copied to the device

OnRead = Callable[[int], object]


class PlacedCheckpoint(Checkpoint):
    """The same checkpoint; `tensor` gives its part on `device`. For any number of threads.

    A thread takes BUFFERS + 1 blocks of host memory, which is pinned for a GPU.
    on_read   is told the bytes of every read, from any thread
    threads   of its own, which read blocks side by side: one tensor's, and many tensors'
    """

    def __init__(
        self,
        source: Checkpoint,
        device: torch.device,
        on_read: OnRead = lambda _: None,
        threads: int = 1,
    ) -> None:
        super().__init__(source.folder, source.tensors)
        self._device = device
        self._pool = None
        if threads > 1:
            self._pool = threads_at(device, threads, "kdray-read")
        self._on_read = on_read
        self._behind = _ReadBehind(behind_bytes())
        self._own = threading.local()

    def tensor(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        return self.several([Part(name, rows, cols)])[0]

    def several(self, parts: Sequence[Part]) -> list[Tensor]:
        """tensor() of each, all their blocks side by side."""
        cuts = [self.cut(*part) for part in parts]
        outs = [torch.empty(cut.shape, dtype=cut.dtype, device=self._device) for cut in cuts]
        blocks = [
            (cut.of_rows(rows), out[rows.start : rows.stop] if cut.shape else out)
            for cut, out in zip(cuts, outs, strict=True)
            for rows in cut.blocks()
        ]
        for cut in cuts:  # a disk is busy only where it knows of many parts at a time
            if 0 < cut.num_bytes < BLOCK_BYTES:
                cut.stored.shard.expect(cut.start, cut.start + cut.num_bytes)
        each = map if self._pool is None else self._pool.map
        list(each(lambda block: self._place(*block), blocks))
        return outs

    def _place(self, cut: Cut, out: Tensor) -> None:
        if self._device.type == "cpu":
            fill(cut, out)
        else:
            self._stage().fill(cut, out)
        self._behind.add(cut)
        self._on_read(cut.num_bytes)

    def close(self) -> None:
        """End the threads, and give their buffers back."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _stage(self) -> Stage:
        if not hasattr(self._own, "stage"):
            self._own.stage = Stage(self._device)
        stage: Stage = self._own.stage
        return stage


def behind_bytes() -> int:
    return max(LEAST_BEHIND_BYTES, host_bytes() // BEHIND_PART)


def with_index(device: torch.device) -> torch.device:
    """ "cuda" means the current GPU to this thread, and GPU 0 to those that read for it."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def threads_at(device: torch.device, most: int, name: str) -> ThreadPoolExecutor:
    """Threads that work on the device; a new thread takes GPU 0 otherwise, which may be another
    rank's."""
    if device.type != "cuda":
        return ThreadPoolExecutor(most, name)
    return ThreadPoolExecutor(most, name, torch.cuda.set_device, (with_index(device),))


class Stage:
    """The staging buffers of one thread."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [_Buffer(device) for _ in range(BUFFERS)]
        self._rows = torch.empty(0, dtype=torch.uint8)  # whole rows, of which columns are kept
        self._next = 0

    def fill(self, cut: Cut, out: Tensor) -> None:
        """Read a part into `out`, block by block; its copies are ordered on the current stream."""
        if not out.numel():
            return
        flat = out.view(-1) if out.dim() < 2 else out.view(cut.num_rows, -1)
        for rows in cut.blocks():
            target = flat[rows.start : rows.stop]
            buffer = self._buffers[self._next]
            self._next = (self._next + 1) % BUFFERS
            host = buffer.take(target)
            raw = host.view(-1).view(torch.uint8)
            if cut.kept is None:
                cut.read(rows, raw)
            else:
                whole = self._whole(len(rows) * cut.row_bytes)
                cut.read(rows, whole)
                keep_columns(whole, cut, raw.view(len(rows), -1))
            refuse_broken_numbers(cut, host)
            buffer.send(host, target)

    def _whole(self, size: int) -> Tensor:
        if len(self._rows) < size:
            self._rows = torch.empty(max(size, BLOCK_BYTES), dtype=torch.uint8)
        return self._rows[:size]


class _Buffer:
    """Host memory that is free again once its last copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._sent: torch.cuda.Event | None = None

    def take(self, like: Tensor) -> Tensor:
        """Room for a copy of `like`."""
        if self._sent is not None:
            self._sent.synchronize()
        size = like.numel() * like.dtype.itemsize
        if len(self._memory) < size:
            self._memory = torch.empty(
                max(size, BLOCK_BYTES), dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
        return self._memory[:size].view(like.dtype).view(like.shape)

    def send(self, host: Tensor, target: Tensor) -> None:
        target.copy_(host, non_blocking=True)
        if self._device.type == "cuda":
            self._sent = torch.cuda.Event()
            self._sent.record(torch.cuda.current_stream(self._device))


class _ReadBehind:
    """Lets the page cache forget what was read longest ago."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._read: deque[tuple[ShardFile, int, int]] = deque()
        self._lock = threading.Lock()

    def add(self, cut: Cut) -> None:
        if not cut.num_bytes:
            return
        with self._lock:
            self._read.append((cut.stored.shard, cut.start, cut.start + cut.num_bytes))
            self._held += cut.num_bytes
            old = []
            while self._held > self._limit:
                shard, start, end = self._read.popleft()
                self._held -= end - start
                old.append((shard, start, end))
        for shard, start, end in old:
            shard.forget(start, end)
