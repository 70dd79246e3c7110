"""Weights of any size made where they are used: cut from two small pools of random numbers.

A rank's shard of Kimi K2.6 is 71 GiB, which no disk has to hold: every tensor is a run of a pool
that starts where the tensor's name says, copied and scaled. Experts go through the product's own
packing. What comes out has the scale of trained weights, so that nothing overflows in 61 layers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kdray.model import dflash_weights
from kdray.model.balanced_words import UNIFORM_STD, balanced
from kdray.model.checkpoint import Checkpoint, Part
from kdray.model.config import INT4_GROUP, ModelConfig
from kdray.model.dflash import DraftWeights
from kdray.model.dflash_config import DFlashConfig
from kdray.model.draft_int4 import MlpForm
from kdray.model.int4 import PER_WORD
from kdray.model.manifest import needed_tensors
from kdray.model.target import TargetModel
from kdray.model.target_tables import TargetTables

POOL_NUMBERS = {"cuda": (1 << 25) + 9, "cpu": (1 << 18) + 9}  # odd: rows of a matrix never repeat
BIAS_STD = 0.02
FAR_ROWS = 0.25  # what the head's rows of other ranks are multiplied by (see whole_tables)
WORD, ONES = 1 << 31, 0x1111_1111

Shape = tuple[int, ...]


class Noise:
    """The pools of one device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        count = POOL_NUMBERS[device.type]
        generator = torch.Generator(device).manual_seed(seed)
        self.device = device
        normal = torch.randn(count, generator=generator, device=device)
        self._normal = normal.to(torch.bfloat16)
        words = torch.randint(
            -WORD, WORD, (count,), generator=generator, device=device, dtype=torch.int32
        )
        self._words = balanced(words, ONES)
        self._scales: dict[int, Tensor] = {}

    def normal(self, name: str, shape: Shape) -> Tensor:
        """bfloat16 of variance 1. May be a part of the pool: not to be written."""
        return _run(self._normal, name, shape)

    def words(self, name: str, shape: Shape) -> Tensor:
        """int32, eight random INT4 weights; as above."""
        return _run(self._words, name, shape)

    def scales(self, name: str, shape: Shape, inputs: int) -> Tensor:
        """bfloat16: INT4 weights of `inputs` inputs keep the variance of what they multiply."""
        if inputs not in self._scales:
            middle = inputs**-0.5 / UNIFORM_STD
            self._scales[inputs] = ((1 + 0.1 * self._normal).clamp(0.6, 1.4) * middle).bfloat16()
        return _run(self._scales[inputs], name, shape)


class RandomCheckpoint(Checkpoint):
    """Every tensor of `shapes`, drawn by its name whenever it is asked for.

    shapes   whole tensors by their names, linears as [out, in]
    packed   linears that are stored as INT4, by their names without an ending
    """

    def __init__(
        self, shapes: Mapping[str, Shape], noise: Noise, packed: Mapping[str, Shape] | None = None
    ) -> None:
        super().__init__(Path("random"), {})
        self._shapes = dict(shapes)
        self._packed = dict(packed or {})
        self._noise = noise

    @classmethod
    def of_target(cls, config: ModelConfig, noise: Noise) -> RandomCheckpoint:
        shapes: dict[str, Shape] = {}
        packed: dict[str, Shape] = {}
        for needed in needed_tensors(config):
            if needed.is_expert and config.quantization == "int4":
                packed[needed.name] = needed.shape
            else:
                shapes[needed.name + (".weight" if needed.is_linear else "")] = needed.shape
        return cls(shapes, noise, packed)

    def __contains__(self, name: str) -> bool:
        stem, _, ending = name.rpartition(".")
        return name in self._shapes or (ending.startswith("weight_") and stem in self._packed)

    def tensor(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """Memory of its own: what is laid out as stored is used as it is."""
        return self._drawn(Part(name, rows, cols)).clone()

    def several(self, parts: Sequence[Part]) -> list[Tensor]:
        """What is packed or dequantised out of place: parts of the pools do."""
        return [self._drawn(part) for part in parts]

    def _drawn(self, part: Part) -> Tensor:
        stem, _, ending = part.name.rpartition(".")
        if stem in self._packed:
            outputs, inputs = self._packed[stem]
            unit = PER_WORD if ending == "weight_packed" else INT4_GROUP
            shape = _cut((outputs, inputs // unit), part)
            if ending == "weight_packed":
                return self._noise.words(part.name, shape)
            return self._noise.scales(part.name, shape, inputs)
        whole = self._shapes[part.name]
        shape = _cut(whole, part)
        if part.name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device=self._noise.device)
        drawn = self._noise.normal(part.name, shape)
        if len(whole) == 1:
            return drawn * BIAS_STD
        return drawn if "embed" in part.name else drawn * whole[-1] ** -0.5


def draft_weights(
    config: DFlashConfig, noise: Noise, dtype: torch.dtype, device: torch.device, form: MlpForm
) -> DraftWeights:
    """A drafter's, by the product's own reader."""
    checkpoint = RandomCheckpoint(dict(dflash_weights.weight_shapes(config)), noise)
    reader = dflash_weights._Reader(checkpoint, dtype, device, config.rms_norm_eps)
    read_mlp = dflash_weights._mlp_reader(reader, config, form)
    return DraftWeights(
        fc=reader.matrix("fc.weight"),
        hidden_norm=reader.norm("hidden_norm.weight"),
        layers=tuple(
            dflash_weights._layer(reader, layer, config, read_mlp)
            for layer in range(len(config.layers))
        ),
        norm=reader.norm("norm.weight"),
    )


def whole_tables(target: TargetModel, noise: Noise) -> TargetTables:
    """Embedding and head of the whole vocabulary, which a drafter reads on rank 0.

    Rows of other ranks are drawn here. In the head they are smaller: the drafter's best tokens are
    then rank 0's own, which it can embed without the others; another rank's token would be a row of
    zeros where sums are looped back, and all such rows would choose the same experts.
    """
    if target.shard.size == 1:
        return TargetTables.shared(target)
    tables = []
    for name, own, factor in (
        ("embedding", target.embedding, 1.0),
        ("head", target.head, FAR_ROWS * target.config.hidden_size**-0.5),
    ):
        whole = own.new_empty(target.config.vocab_size, own.shape[1])
        for first in range(0, len(whole), len(own)):
            part = whole[first : first + len(own)]
            part.copy_(noise.normal(f"{name}.{first}", tuple(own.shape))).mul_(factor)
        whole[target.shard.slice_of(len(whole))] = own
        tables.append(whole)
    return TargetTables(embedding=tables[0], head=tables[1])


def fill(caches: Sequence[Tensor], noise: Noise) -> None:
    """Caches of numbers as if text had been read; those of bytes (fp8) keep their zeros."""
    for layer, cache in enumerate(caches):
        if cache.is_floating_point():
            flat = cache.view(-1)
            step = POOL_NUMBERS[noise.device.type]
            for first in range(0, len(flat), step):
                part = flat[first : first + step]
                part.copy_(noise.normal(f"cache.{layer}.{first}", tuple(part.shape)))


def _cut(shape: Shape, part: Part) -> Shape:
    """The shape of some rows and columns."""
    slices = (part.rows, part.cols)[: len(shape)]
    cut = [
        len(range(*(which or slice(None)).indices(size)))
        for size, which in zip(shape, slices, strict=False)
    ]
    return (*cut, *shape[len(cut) :])


def _run(pool: Tensor, name: str, shape: Shape) -> Tensor:
    """Numbers of a pool from a place on that the name gives, from its start again at its end."""
    count, size = math.prod(shape), len(pool)
    place = zlib.crc32(name.encode())
    if count <= size // 2:
        start = place % (size - count)
        return pool[start : start + count].view(shape)
    start, out, done = place % size, torch.empty(count, dtype=pool.dtype, device=pool.device), 0
    while done < count:
        piece = pool[start : start + count - done]
        out[done : done + len(piece)] = piece
        done, start = done + len(piece), 0
    return out.view(shape)
