"""INT4 weights as compressed-tensors packs them (format pack-quantized, symmetric, groups of 32).

A row of `in` inputs is in/8 int32 words, input 8j + i in bits 4i .. 4i + 3 of word j, stored as
q + 8 with q in -8 .. 7. Group g = inputs 32g .. 32g + 31 shares one scale: w = q * scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdray.errors import ConfigError
from kdray.model.checkpoint import Checkpoint, Part
from kdray.model.config import INT4_GROUP

PER_WORD = 8
_ZERO = 8


class PackedWeight(NamedTuple):
    """packed [out, in / 8] int32, scale [out, in / 32] float."""

    packed: Tensor
    scale: Tensor


def quantize(weight: Tensor, scale_dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    """[out, in] float -> packed; scale = absmax / 7.5 of a group, rounded to scale_dtype."""
    grouped = torch.unflatten(weight.float(), -1, (-1, INT4_GROUP))
    scale = (grouped.abs().amax(-1) / 7.5).to(scale_dtype)
    steps = grouped / scale.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    q = steps.round().clamp(-8, 7).to(torch.int32).flatten(-2)
    return PackedWeight(pack(q), scale)


def pack(q: Tensor) -> Tensor:
    """Integers -8 .. 7 [out, in] -> words [out, in / 8] int32."""
    nibbles = torch.unflatten(q.to(torch.int64) + _ZERO, -1, (-1, PER_WORD))
    words = (nibbles << _shifts(q.device)).sum(-1)
    # Words are unsigned here; those of 2^31 and more wrap to negative int32.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(packed: Tensor) -> Tensor:
    """Words [out, in / 8] int32 -> integers -8 .. 7 [out, in] int8."""
    nibbles = (packed[..., None] >> _shifts(packed.device)) & 0xF
    return (nibbles - _ZERO).to(torch.int8).flatten(-2)


def dequantize(weight: PackedWeight) -> Tensor:
    """[out, in] in the scale's dtype, each product rounded once, as the format's reference does."""
    q = torch.unflatten(unpack(weight.packed).to(weight.scale.dtype), -1, (-1, INT4_GROUP))
    return (q * weight.scale[..., None]).flatten(-2)


def read_linear(
    checkpoint: Checkpoint, name: str, rows: slice | None = None, cols: slice | None = None
) -> Tensor:
    """The weight of linear `name`, or some outputs (rows) and inputs (cols) of it, dequantised."""
    if f"{name}.weight_packed" not in checkpoint:
        return checkpoint.tensor(f"{name}.weight", rows, cols)
    return dequantize(read_packed(checkpoint, name, rows, cols))


def read_packed(
    checkpoint: Checkpoint, name: str, rows: slice | None = None, cols: slice | None = None
) -> PackedWeight:
    """The packed weight of linear `name`, or some outputs (rows) and inputs (cols) of it."""
    return PackedWeight(*checkpoint.several(packed_parts(name, rows, cols)))


def packed_parts(name: str, rows: slice | None, cols: slice | None) -> tuple[Part, Part]:
    """Where the words and the scales of some outputs and inputs lie."""
    return (
        Part(f"{name}.weight_packed", rows, _coarsen(cols, PER_WORD, name)),
        Part(f"{name}.weight_scale", rows, _coarsen(cols, INT4_GROUP, name)),
    )


def _coarsen(cols: slice | None, unit: int, name: str) -> slice | None:
    """A slice of inputs as one of words or scales; it must hold whole groups."""
    if cols is None:
        return None
    if cols.start % INT4_GROUP or cols.stop % INT4_GROUP:
        raise ConfigError(
            f"inputs {cols.start} to {cols.stop} of {name} cut an INT4 group of {INT4_GROUP}; "
            f"choose a tp whose share of its inputs is a multiple of {INT4_GROUP}"
        )
    return slice(cols.start // unit, cols.stop // unit)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 4 * PER_WORD, 4, device=device, dtype=torch.int32)
