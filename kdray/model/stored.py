"""One safetensors file: where its tensors lie, by its header alone, and reads of parts of it."""

from __future__ import annotations

import json
import math
import os
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from kdray.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
METADATA = "__metadata__"
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class ShardFile:
    """One file; opened at its first read, closed with the last tensor that lies in it."""

    path: Path

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill `target` with the bytes from `start` on. Threads may read at the same time."""
        done = 0
        while done < len(target):
            try:
                got = os.preadv(self._descriptor, [target[done:]], start + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be read at byte {start + done}: {error}"
                ) from error
            if not got:
                raise CheckpointError(
                    f"{self.path} ends at byte {start + done}, though it was longer when it was "
                    "opened; download it again"
                )
            done += got

    def expect(self, start: int, end: int) -> None:
        """Tell the system that these bytes are read next: it fetches them while others are read."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, end - start, os.POSIX_FADV_WILLNEED)

    def forget(self, start: int, end: int) -> None:
        """Tell the system that these bytes need not stay in its page cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, end - start, os.POSIX_FADV_DONTNEED)

    @cached_property
    def _descriptor(self) -> int:
        descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, descriptor)
        return descriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: bytes `start` to `end` of its file, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    shard: ShardFile

    @property
    def path(self) -> Path:
        return self.shard.path


def read_header(path: Path) -> Iterator[StoredTensor]:
    """The tensors of one file: 8 bytes of header length, a JSON header, then the data."""
    size = path.stat().st_size
    length, entries = _read_entries(path, size)
    shard = ShardFile(path)
    tensors = [
        _stored_tensor(name, entry, shard, data_start=8 + length, file_size=size)
        for name, entry in entries.items()
        if name != METADATA
    ]
    _refuse_overlaps(tensors)
    yield from tensors


def _read_entries(path: Path, size: int) -> tuple[int, dict[str, Any]]:
    """The header's length and its object."""
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path} is truncated: {size} bytes hold no header")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path} declares a header of {length} bytes, more than the format's "
                f"{MAX_HEADER_BYTES}; it is not a safetensors file"
            )
        header = file.read(length)
    if len(header) < length:
        raise CheckpointError(f"{path} is truncated: {size} bytes, its header needs {8 + length}")
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except ValueError as error:
        raise CheckpointError(f"{path} has a broken header: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} has a broken header: it is no JSON object")
    return length, entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is listed twice")
    return values


def _stored_tensor(
    name: str, entry: Any, shard: ShardFile, *, data_start: int, file_size: int
) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{shard.path}: broken header entry of {name}: {error!r}") from error
    if data_start + end > file_size:
        raise CheckpointError(
            f"{shard.path} is truncated: {file_size} bytes, but {name} ends at byte "
            f"{data_start + end}; download it again"
        )
    bytes_wanted = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    if begin < 0 or end < begin or (dtype in ITEM_BYTES and end - begin != bytes_wanted):
        raise CheckpointError(
            f"{shard.path}: {name} of {list(shape)} {dtype} cannot lie in bytes {begin} to {end}"
        )
    return StoredTensor(
        name=name,
        dtype=dtype,
        shape=shape,
        start=data_start + begin,
        end=data_start + end,
        shard=shard,
    )


def _refuse_overlaps(tensors: list[StoredTensor]) -> None:
    lying = sorted((t for t in tensors if t.end > t.start), key=lambda t: t.start)
    for before, after in pairwise(lying):
        if after.start < before.end:
            raise CheckpointError(
                f"{after.path}: {after.name} begins at byte {after.start}, inside {before.name}, "
                f"which ends at byte {before.end}; download it again"
            )
