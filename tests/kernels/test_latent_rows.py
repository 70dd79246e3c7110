"""Rows in fp8: their layout, what they keep, and what ops make of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdray.kernels.latent_rows import (
    FP8,
    RowFormat,
    dequantised,
    gathered,
    is_fp8,
    quantised,
    row_bytes,
)
from kdray.kernels.reference import ReferenceOps
from tests.kernels.attention_cases import Part, difference, expected, make_case, quantised_case

SIZES = ((512, 64), (64, 16), (128, 32), (32, 8), (24, 6))
SCALE = 0.3


def drawn(rows: int, latent: int, rope: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(-6, 6, rows)[:, None]
    numbers = torch.randn(rows, latent + rope, generator=generator)
    return (size * numbers[:, :latent]).bfloat16(), numbers[:, latent:].bfloat16()


def test_rows_are_odd_numbers_of_chunks() -> None:
    assert [row_bytes(*sizes) for sizes in SIZES[:3]] == [656, 112, 208]
    assert all(row_bytes(*sizes) % 32 == 16 for sizes in SIZES)
    assert RowFormat.of(512, 64, FP8) == RowFormat(656, torch.uint8)
    assert RowFormat.of(512, 64, torch.bfloat16) == RowFormat(576, torch.bfloat16)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_written_is_read(sizes: tuple[int, int]) -> None:
    """The key to its bit, a latent within half of e4m3's last place or its least step."""
    latent, key = drawn(40, *sizes)
    rows = quantised(latent, key)
    assert rows.shape == (40, row_bytes(*sizes)) and is_fp8(rows)
    found = dequantised(rows, *sizes)
    assert torch.equal(found[:, sizes[0] :], key.float())
    off = (found[:, : sizes[0]] - latent.float()).abs()
    largest = latent.float().abs().amax(1, keepdim=True)
    assert (off <= latent.float().abs() * 2.0**-4 + largest * 2.0**-18).all()
    at = latent.float().abs().argmax(1, keepdim=True)
    torch.testing.assert_close(found.gather(1, at), latent.float().gather(1, at), rtol=1e-6, atol=0)


def test_halves_round_to_even() -> None:
    """A row whose largest is 448 has the scale 1: codes are the numbers' own."""
    latent = torch.tensor([[448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, 0.0, -448.0]])
    found = dequantised(quantised(latent, torch.zeros(1, 2)), 8, 2)[0, :8]
    assert found.tolist() == [448.0, 16.0, 20.0, -16.0, 0.0, 2.0**-8, 0.0, -448.0]


def test_rows_of_nothing_and_of_no_numbers() -> None:
    latent = torch.zeros(5, 16)
    latent[1] = 2.0**-110
    latent[2, 3] = torch.nan
    latent[3, 3], latent[3, 4] = torch.inf, 1.0
    latent[4, 3] = 2.0**127
    found = dequantised(quantised(latent, torch.zeros(5, 2)), 16, 2)[:, :16]
    assert (found[:2] == 0).all() and found[2].isnan().all() and found[3, 3].isnan()
    assert found[4, 3] == 2.0**127 and found[4].isfinite().all()


def test_a_cache_of_either_kind_is_gathered() -> None:
    latent, key = drawn(6, 32, 8)
    slots = torch.tensor([4, 0, 0, 5])
    rows, plain = quantised(latent, key), torch.cat([latent, key], 1)
    assert torch.equal(gathered(plain, slots, 32, 8), plain[slots])
    assert torch.equal(gathered(rows, slots, 32, 8), dequantised(rows, 32, 8)[slots])


def test_attention_over_rows_in_fp8_is_that_over_what_they_stand_for() -> None:
    parts = [Part(37, nodes=9), Part(3, known=5, nodes=4)]
    case = make_case(parts, heads=3, latent=64, rope=16, page_size=16, dtype=torch.float32)
    stored = quantised_case(case, 64)
    ops = ReferenceOps(torch.device("cpu"))
    out = ops.verify_attention(stored.case.query, stored.rows, case.batch, SCALE, 64)
    assert difference(out, expected(stored.case, SCALE, 64)) < 1e-5
    # A latent is off by 2^-4 / sqrt(3) at most as a rule, and so are its scores and its values.
    assert 2.0**-9 < difference(out, expected(case, SCALE, 64)) < 2.0**-3
