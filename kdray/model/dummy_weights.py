"""Weights of any size drawn where they are used, by name: what `load_format` "dummy" runs on.

Every tensor is a run of a pool of random numbers that starts where the tensor's name says, scaled
as trained weights are, so that nothing overflows in 61 layers. A part of a tensor is the same
numbers whoever draws it: ranks of any tp hold parts of one model, the same in every process.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kdray.model.balanced_words import UNIFORM_STD, balanced
from kdray.model.checkpoint import Checkpoint, Cut, Part
from kdray.model.config import INT4_GROUP, ModelConfig
from kdray.model.int4 import PER_WORD
from kdray.model.manifest import needed_tensors
from kdray.model.stored import ITEM_BYTES, ShardFile, StoredTensor

# Primes: however wide a matrix is, no two of its rows are the same run.
POOL_NUMBERS = {"cuda": (1 << 25) + 35, "cpu": (1 << 18) + 3}
SEED = 0
BIAS_STD = 0.02
WORD, ONES = 1 << 31, 0x1111_1111

Shape = tuple[int, ...]
OnDrawn = Callable[[int], object]


class Described(NamedTuple):
    """A tensor as a file's header would describe it."""

    name: str
    dtype: str
    shape: Shape


def target_tensors(config: ModelConfig) -> Iterator[Described]:
    """Of a target, its experts packed where its config says INT4, as published."""
    for needed in needed_tensors(config):
        if needed.is_expert and config.quantization == "int4":
            outputs, inputs = needed.shape
            yield Described(f"{needed.name}.weight_packed", "I32", (outputs, inputs // PER_WORD))
            yield Described(f"{needed.name}.weight_scale", "BF16", (outputs, inputs // INT4_GROUP))
        else:
            name = f"{needed.name}.weight" if needed.is_linear else needed.name
            dtype = "F32" if name.endswith("e_score_correction_bias") else "BF16"
            yield Described(name, dtype, needed.shape)


def described(folder: Path, tensors: Iterable[Described]) -> Checkpoint:
    """A checkpoint of headers alone, for the checks that files go through."""
    source = ShardFile(folder / "config.json")  # what a message names
    return Checkpoint(folder, {tensor.name: _stored(tensor, source) for tensor in tensors})


class Pool:
    """A ring of random numbers: a run goes on at its start behind its end."""

    def __init__(self, numbers: Tensor) -> None:
        self._size = len(numbers)
        self._twice = torch.cat([numbers, numbers])  # any run of its size is a view

    @property
    def numbers(self) -> Tensor:
        return self._twice[: self._size]

    def run(self, name: str, count: int) -> Tensor:
        """[count], at most the pool's size; not to be written."""
        return self._view(zlib.crc32(name.encode()), count)

    def pieces(self, cut: Cut) -> list[Tensor]:
        """A part of a tensor as runs of its rows [.., columns]; not to be written."""
        item = cut.dtype.itemsize
        width, cols = cut.row_bytes // item, slice(None)
        if cut.kept is not None:
            cols = slice(cut.kept.start // item, cut.kept.stop // item)
        place = zlib.crc32(cut.stored.name.encode()) + cut.start // item
        most = self._size // width
        runs = (range(at, min(at + most, cut.num_rows)) for at in range(0, cut.num_rows, most))
        return [
            self._view(place + rows.start * width, len(rows) * width).view(-1, width)[:, cols]
            for rows in runs
        ]

    def _view(self, place: int, count: int) -> Tensor:
        start = place % self._size
        return self._twice[start : start + count]


class Noise:
    """The pools of one device, each made when it is first wanted; for any number of threads."""

    def __init__(self, device: torch.device, seed: int = SEED) -> None:
        self.device = device
        self.num_numbers = POOL_NUMBERS[device.type]
        self._seed = seed
        self._pools: dict[tuple[str, int], Pool] = {}
        self._lock = threading.RLock()

    @property
    def normal(self) -> Pool:
        """bfloat16 of variance 1."""
        return self._pool(("normal", 0), self._draw_normal)

    @property
    def words(self) -> Pool:
        """int32, eight random INT4 weights each."""
        return self._pool(("words", 0), self._draw_words)

    def scales(self, inputs: int) -> Pool:
        """bfloat16: INT4 weights of `inputs` inputs keep the variance of what they multiply."""
        middle = inputs**-0.5 / UNIFORM_STD
        return self._pool(
            ("scales", inputs),
            lambda: ((1 + 0.1 * self.normal.numbers).clamp(0.6, 1.4) * middle).bfloat16(),
        )

    def _pool(self, kind: tuple[str, int], draw: Callable[[], Tensor]) -> Pool:
        with self._lock:
            if kind not in self._pools:
                self._pools[kind] = Pool(draw())
            return self._pools[kind]

    def _draw_normal(self) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self._seed)
        drawn = torch.randn(self.num_numbers, generator=generator, device=self.device)
        return drawn.to(torch.bfloat16)

    def _draw_words(self) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self._seed + 1)
        size, device = (self.num_numbers,), self.device
        words = torch.randint(
            -WORD, WORD, size, generator=generator, device=device, dtype=torch.int32
        )
        drawn: Tensor = balanced(words, ONES)
        return drawn


class DrawnCheckpoint(Checkpoint):
    """The tensors that `source` describes, drawn on `device` whenever they are asked for.

    on_drawn   is told the bytes of every part, from any thread
    """

    def __init__(
        self, source: Checkpoint, device: torch.device, on_drawn: OnDrawn = lambda _: None
    ) -> None:
        super().__init__(source.folder, source.tensors)
        self._device = device
        self._on_drawn = on_drawn
        self._noise = Noise(device)

    def tensor(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """Memory of its own: what is laid out as stored is used as it is."""
        cut = self._cut_of(Part(name, rows, cols))
        if name.endswith("norm.weight"):
            return torch.ones(cut.shape, dtype=cut.dtype, device=self._device)
        drawn = torch.cat(self._pool_of(cut).pieces(cut)).view(cut.shape)
        if cut.stored.dtype == "I32" or name.endswith("weight_scale"):
            return drawn
        return drawn.mul_(_spread(cut.stored)).to(cut.dtype)

    def several(self, parts: Sequence[Part]) -> list[Tensor]:
        """As tensor(); what is packed may be a part of a pool, as who unpacks it copies it."""
        return [self._part(part) for part in parts]

    def close(self) -> None:
        """Wait for what is drawn, and give the pools back."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._noise = Noise(self._device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for those who do not take memory through torch

    def _part(self, part: Part) -> Tensor:
        if not part.name.endswith(("weight_packed", "weight_scale")):
            return self.tensor(*part)
        cut = self._cut_of(part)
        pieces = self._pool_of(cut).pieces(cut)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _cut_of(self, part: Part) -> Cut:
        cut = self.cut(*part)
        self._on_drawn(cut.dtype.itemsize * torch.Size(cut.shape).numel())
        return cut

    def _pool_of(self, cut: Cut) -> Pool:
        if cut.stored.dtype == "I32":
            return self._noise.words
        if cut.stored.name.endswith("weight_scale"):
            return self._noise.scales(cut.stored.shape[1] * INT4_GROUP)
        return self._noise.normal


def _spread(stored: StoredTensor) -> float:
    """The standard deviation that keeps the variance of what is multiplied."""
    if len(stored.shape) == 1:
        return BIAS_STD
    return 1.0 if "embed_tokens" in stored.name else float(stored.shape[-1] ** -0.5)


def _stored(tensor: Described, source: ShardFile) -> StoredTensor:
    size = torch.Size(tensor.shape).numel() * ITEM_BYTES[tensor.dtype]
    return StoredTensor(
        name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, start=0, end=size, shard=source
    )
