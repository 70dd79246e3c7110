"""Rows of the latent cache: numbers as the model has them, or the latent in fp8.

A row of fp8 is bytes, [C e4m3 latent | D bfloat16 rotated key | float32 scale | padding], an odd
number of 16-byte chunks: eight rows' chunks of one place lie in different banks of a
multiprocessor's shared memory. Caches of such rows are uint8 tensors [S, bytes].

scale = largest / 448, largest being the latent's largest magnitude, and a latent is stored as
e4m3(latent * (448 / largest)), to nearest, halves to even: within 2^-4 of itself, relatively, or
within largest * 2^-18 absolutely. A row whose largest is below 2^-100 is stored as zeros with scale
0. What is no number, or infinite, makes the whole latent no number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_CODE = 448.0  # of e4m3
LEAST_LARGEST = 2.0**-100  # below it 448 / largest nears float32's end
CHUNK_BYTES = 16
KEY_BYTES = 2  # a number of the rotated key
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What a cache tensor is made of: `width` numbers of `dtype` a row."""

    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, latent_dim: int, rope_dim: int, kept_as: torch.dtype) -> RowFormat:
        """kept_as: what numbers are kept as; FP8 for the latent alone in fp8."""
        if kept_as == FP8:
            return cls(row_bytes(latent_dim, rope_dim), torch.uint8)
        return cls(latent_dim + rope_dim, kept_as)

    @property
    def is_fp8(self) -> bool:
        return self.dtype == torch.uint8


def row_bytes(latent_dim: int, rope_dim: int) -> int:
    """Of a row in fp8: 656 for 512 + 64 numbers, which are 1,152 bytes in bfloat16."""
    filled = latent_dim + KEY_BYTES * rope_dim + SCALE_BYTES
    return CHUNK_BYTES * (-(-filled // CHUNK_BYTES) | 1)


def is_fp8(cache: Tensor) -> bool:
    return cache.dtype == torch.uint8


def quantised(latent: Tensor, key: Tensor) -> Tensor:
    """latent [T, C] and key [T, D] -> rows in fp8 [T, bytes] uint8."""
    num_rows, latent_dim = latent.shape
    latent = latent.float()
    largest = latent.abs().amax(dim=-1, keepdim=True)
    largest = largest.masked_fill(largest < LEAST_LARGEST, 0.0)
    # A tensor: torch multiplies by a number's reciprocal instead, which rounds twice.
    code_limit = torch.full_like(largest, LARGEST_CODE)
    factor = torch.where(largest == 0, 0.0, code_limit / largest)
    code = (latent * factor).clamp(-LARGEST_CODE, LARGEST_CODE).to(FP8)
    rows = latent.new_zeros(num_rows, row_bytes(latent_dim, key.shape[1]), dtype=torch.uint8)
    at = 0
    for part in (code, key.to(torch.bfloat16), largest / code_limit):
        end = at + part.shape[1] * part.itemsize
        rows[:, at:end].view(part.dtype).copy_(part)
        at = end
    return rows


def dequantised(rows: Tensor, latent_dim: int, rope_dim: int) -> Tensor:
    """Rows in fp8 [n, bytes] -> [n, C + D] float32."""
    sizes = (latent_dim, KEY_BYTES * rope_dim, SCALE_BYTES)
    code, key, scale = rows[:, : sum(sizes)].split_with_sizes(sizes, dim=1)
    latent = code.contiguous().view(FP8).float() * scale.contiguous().view(torch.float32)
    return torch.cat([latent, key.contiguous().view(torch.bfloat16).float()], dim=1)


def gathered(cache: Tensor, slots: Tensor, latent_dim: int, rope_dim: int) -> Tensor:
    """Rows `slots` [n] of a cache of either kind -> [n, C + D], in the cache's dtype or float32."""
    rows = cache.index_select(0, slots)
    return dequantised(rows, latent_dim, rope_dim) if is_fp8(cache) else rows
