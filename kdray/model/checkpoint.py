"""A folder of safetensors files: headers read once, tensors sliced out of memory maps."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kdray.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
FLOATS = ("BF16", "F16", "F32")

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class _Readable(NamedTuple):
    stored: type[np.generic]
    dtype: torch.dtype


# NumPy has no bfloat16: its bits travel as int16.
_READABLE = {
    "BF16": _Readable(np.int16, torch.bfloat16),
    "F16": _Readable(np.float16, torch.float16),
    "F32": _Readable(np.float32, torch.float32),
    "I32": _Readable(np.int32, torch.int32),
    "I64": _Readable(np.int64, torch.int64),
}


@dataclass(frozen=True)
class _Shard:
    """One file; the map is made on first use and shared by all its tensors."""

    path: Path

    @cached_property
    def bytes(self) -> np.memmap[Any, np.dtype[np.uint8]]:
        return np.memmap(self.path, dtype=np.uint8, mode="r")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: bytes `start` to `end` of its file, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    shard: _Shard

    @property
    def path(self) -> Path:
        return self.shard.path


class Checkpoint:
    """Every tensor of a model folder by name, without the `language_model.` prefix of Kimi K2.5.

    Vision tensors are left out. Opening reads the headers only.
    """

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self.folder = folder
        self._tensors = tensors

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read the header of every shard: the index's, model.safetensors, or all *.safetensors."""
        folder = Path(folder)
        indexed = _read_index(folder)
        tensors: dict[str, StoredTensor] = {}
        for path in _shard_paths(folder, indexed):
            for stored in _read_header(path):
                name = _text_name(stored.name)
                if name is None:
                    continue
                if name in tensors:
                    raise CheckpointError(
                        f"tensor {name} is stored twice, in {tensors[name].path} and {path}"
                    )
                tensors[name] = stored
        for raw_name, file in (indexed or {}).items():
            name = _text_name(raw_name)
            if name is not None and (name not in tensors or tensors[name].path.name != file):
                raise CheckpointError(
                    f"tensor {raw_name} is not in {folder / file}, where {folder / INDEX} puts it; "
                    "download the folder again"
                )
        return cls(folder, tensors)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def find(self, name: str) -> StoredTensor:
        """Where the tensor lies; a CheckpointError names it and the folder where it is missing."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"tensor {name} is missing in {self.folder}") from None

    def require(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS
    ) -> StoredTensor:
        """The tensor's place, once its shape and dtype are the wanted ones."""
        stored = self.find(name)
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"tensor {name} has shape {list(stored.shape)} where {list(shape)} is wanted "
                f"({stored.path})"
            )
        if stored.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name} has dtype {stored.dtype} where {' or '.join(dtypes)} is wanted "
                f"({stored.path})"
            )
        return stored

    def tensor(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """A copy of the tensor, or of some of its rows (dim 0) and columns (dim 1).

        Only the slice is read. Its dtype is the stored one.
        """
        stored = self.find(name)
        if stored.dtype not in _READABLE:
            raise CheckpointError(
                f"tensor {name} has dtype {stored.dtype}, which kdray does not read; "
                f"it reads {', '.join(_READABLE)} ({stored.path})"
            )
        kind = _READABLE[stored.dtype]
        raw = stored.shard.bytes[stored.start : stored.end].view(kind.stored)
        array = raw.reshape(stored.shape)
        if rows is not None:
            array = array[rows]
        if cols is not None:
            array = array[:, cols]
        return torch.from_numpy(np.array(array)).view(kind.dtype)


def _text_name(name: str) -> str | None:
    """The language model's name of a tensor; None where it belongs to the vision part."""
    if name.startswith(("vision_tower.", "mm_projector.")):
        return None
    return name.removeprefix("language_model.")


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name, or None in a folder without an index."""
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has no readable weight_map: {error!r}") from error
    for file in names.values():
        if Path(file).name != file:
            raise CheckpointError(f"{path} names {file!r}, which is not a file of this folder")
    return names


def _shard_paths(folder: Path, indexed: dict[str, str] | None) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if indexed is not None:
        paths = [folder / file for file in sorted(set(indexed.values()))]
    elif (folder / SINGLE).exists():
        paths = [folder / SINGLE]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} holds no *.safetensors file")
    for path in paths:
        if not path.exists():
            raise CheckpointError(f"{path} is missing, though {folder / INDEX} names it")
    return paths


def _read_header(path: Path) -> Iterator[StoredTensor]:
    """The entries of one file: 8 bytes of header length, a JSON header, then the data."""
    size = path.stat().st_size
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
    shard = _Shard(path)
    for name, entry in entries.items():
        if name != "__metadata__":
            yield _stored_tensor(name, entry, shard, data_start=8 + length, file_size=size)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is listed twice")
    return values


def _stored_tensor(
    name: str, entry: Any, shard: _Shard, *, data_start: int, file_size: int
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
    bytes_wanted = math.prod(shape) * _ITEM_BYTES.get(dtype, 0)
    if begin < 0 or end < begin or (dtype in _ITEM_BYTES and end - begin != bytes_wanted):
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
