"""A folder of safetensors files: headers read once, tensors read slice by slice."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kdray.errors import CheckpointError
from kdray.model.stored import ITEM_BYTES, StoredTensor, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("BF16", "F16", "F32")
BLOCK_BYTES = 16 << 20  # read at a time
WIDE = 8  # bytes of an int64

_READABLE = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Part(NamedTuple):
    """What `Checkpoint.tensor` is asked for."""

    name: str
    rows: slice | None = None
    cols: slice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The part of a stored tensor that is wanted: some rows, and some columns of each.

    shape, dtype   of the part
    start          byte of the file where its first row begins
    num_rows       that are read, each whole: row_bytes long
    kept           the columns' bytes of a row; None: all
    """

    stored: StoredTensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    num_rows: int
    row_bytes: int
    kept: slice | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that are read."""
        return self.num_rows * self.row_bytes

    def blocks(self) -> Iterator[range]:
        """Its rows in runs of BLOCK_BYTES, or of one row that is longer."""
        step = max(1, BLOCK_BYTES // max(1, self.row_bytes))
        for first in range(0, self.num_rows, step):
            yield range(first, min(first + step, self.num_rows))

    def of_rows(self, rows: range) -> Cut:
        """The part of these rows alone."""
        return replace(
            self,
            shape=(len(rows), *self.shape[1:]) if self.shape else (),
            start=self.start + rows.start * self.row_bytes,
            num_rows=len(rows),
        )

    def read(self, rows: range, target: Tensor) -> None:
        """Whole rows into target [len(rows) * row_bytes] uint8, on the host."""
        self.stored.shard.read_into(target.numpy().data, self.start + rows.start * self.row_bytes)


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
            for stored in read_header(path):
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

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return dict(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def find(self, name: str) -> StoredTensor:
        """Where the tensor lies; a CheckpointError names it and the folder where it is missing."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(
                f"tensor {name} is missing in {self.folder}{self._neighbour(name)}; "
                "download the folder again"
            ) from None

    def _neighbour(self, name: str) -> str:
        """The file that holds what belongs beside a tensor, as words; or nothing."""
        root = name
        while "." in root:
            root = root.rpartition(".")[0]
            for other, stored in self._tensors.items():
                if other.startswith(f"{root}."):
                    return f" ({other} is in {stored.path})"
        return ""

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

    def cut(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Cut:
        """Where a tensor's rows (dim 0) and columns (dim 1, of a matrix) lie."""
        stored = self.find(name)
        if stored.dtype not in _READABLE:
            raise CheckpointError(
                f"tensor {name} has dtype {stored.dtype}, which kdray does not read; "
                f"it reads {', '.join(_READABLE)} ({stored.path})"
            )
        item, (length, *inner) = ITEM_BYTES[stored.dtype], stored.shape or (1,)
        first, last, _ = (rows or slice(None)).indices(length)
        row_bytes, kept = math.prod(inner) * item, None
        if cols is not None:
            left, right, _ = cols.indices(inner[0])
            kept, inner = slice(left * item, right * item), [right - left]
        return Cut(
            stored=stored,
            shape=(max(0, last - first), *inner) if stored.shape else (),
            dtype=_READABLE[stored.dtype],
            start=stored.start + first * row_bytes,
            num_rows=max(0, last - first),
            row_bytes=row_bytes,
            kept=kept,
        )

    def tensor(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """A copy of the tensor, or of some of its rows (dim 0) and columns (dim 1), on the host.

        Only the rows are read. Its dtype is the stored one. Raises CheckpointError for numbers that
        are not finite.
        """
        cut = self.cut(name, rows, cols)
        out = torch.empty(cut.shape, dtype=cut.dtype)
        fill(cut, out)
        return out

    def several(self, parts: Sequence[Part]) -> list[Tensor]:
        """tensor() of each."""
        return [self.tensor(*part) for part in parts]


def fill(cut: Cut, out: Tensor) -> None:
    """Read a part into `out`, on the host."""
    if not out.numel():
        return
    target = out.reshape(-1).view(torch.uint8)
    if cut.kept is None:
        cut.read(range(cut.num_rows), target)
    else:
        wide = target.view(cut.num_rows, -1)
        for rows in cut.blocks():
            block = torch.empty(len(rows) * cut.row_bytes, dtype=torch.uint8)
            cut.read(rows, block)
            keep_columns(block, cut, wide[rows.start : rows.stop])
    refuse_broken_numbers(cut, out)


def keep_columns(whole: Tensor, cut: Cut, target: Tensor) -> None:
    """Of rows just read [n * row_bytes] uint8 the wanted columns, into target [n, ..] uint8."""
    assert cut.kept is not None, "a part of some columns"
    source, left, right = whole.view(len(target), -1), cut.kept.start, cut.kept.stop
    if not (left % WIDE or right % WIDE or cut.row_bytes % WIDE):  # bytes one by one are slow
        source, target = source.view(torch.int64), target.view(torch.int64)
        left, right = left // WIDE, right // WIDE
    target.copy_(source[:, left:right])


def refuse_broken_numbers(cut: Cut, values: Tensor) -> None:
    """CheckpointError where some of a part's numbers, on the host, are NaN or infinite."""
    if not values.is_floating_point():
        return
    lowest, highest = torch.aminmax(values)  # either is NaN where any number is
    if not (math.isfinite(lowest.item()) and math.isfinite(highest.item())):
        raise CheckpointError(
            f"tensor {cut.stored.name} holds numbers that are not finite ({cut.stored.path}); "
            "download it again"
        )


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
    for file in sorted(set(names.values())):
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
        raise CheckpointError(
            f"{folder} holds no *.safetensors file (load_format 'dummy' wants none)"
        )
    for path in paths:
        if not path.exists():
            name = next(name for name, file in (indexed or {}).items() if file == path.name)
            raise CheckpointError(
                f"{path} is missing, though {folder / INDEX} names it, for tensor {name}; "
                "download the folder again"
            )
    return paths
