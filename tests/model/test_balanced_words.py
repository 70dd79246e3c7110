"""Random INT4 weights: all values but -8, without a mean, in whatever array they are drawn."""

from __future__ import annotations

import numpy as np
import torch

from kdray.model.balanced_words import UNIFORM_STD, balanced
from kdray.model.int4 import unpack


def shares(words: np.ndarray) -> np.ndarray:
    """Of every 4-bit number."""
    parts = words.view(np.uint8)
    counts = np.bincount(np.concatenate([parts & 15, parts >> 4]), minlength=16)
    return counts / counts.sum()


def test_only_the_lowest_moves_to_the_middle() -> None:
    every = np.array([0xFEDC_BA98_7654_3210, 0x0F00_F000_0000_0088], dtype=np.uint64)
    found = balanced(every, np.uint64(0x1111_1111_1111_1111))
    assert [hex(word) for word in found.tolist()] == ["0xfedcba9876543218", "0x8f88f88888888888"]


def test_weights_have_no_mean_and_the_spread_that_is_said() -> None:
    drawn = np.random.default_rng(0).integers(0, 2**64 - 1, 1 << 16, np.uint64, endpoint=True)
    words = balanced(drawn, np.uint64(0x1111_1111_1111_1111))
    due = np.full(16, 1 / 16)
    due[[0, 8]] = 0, 1 / 8
    np.testing.assert_allclose(shares(words), due, atol=1e-3)
    weights = unpack(torch.from_numpy(words.view(np.int32).reshape(128, -1))).double()
    assert abs(float(weights.mean())) < 0.02
    assert abs(float(weights.std()) / UNIFORM_STD - 1) < 1e-2


def test_words_of_torch_are_the_same() -> None:
    drawn = np.random.default_rng(1).integers(-(2**31), 2**31, 1 << 12, np.int64).astype(np.int32)
    found = balanced(torch.from_numpy(drawn), 0x1111_1111).numpy().view(np.uint32)
    wanted = balanced(drawn.view(np.uint32), np.uint32(0x1111_1111))
    np.testing.assert_array_equal(found, wanted)
