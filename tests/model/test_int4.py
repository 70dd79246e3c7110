from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kdray.errors import ConfigError
from kdray.model.checkpoint import Checkpoint
from kdray.model.int4 import PackedWeight, dequantize, pack, quantize, read_linear, unpack


def test_layout_of_one_word() -> None:
    """Input i of a word sits in bits 4i .. 4i + 3 as q + 8."""
    q = torch.tensor([[-8, -7, 0, 1, 2, 3, 6, 7]])
    expected = sum((value + 8) << (4 * i) for i, value in enumerate(q[0].tolist()))
    assert expected >= 1 << 31  # the top nibble sets the sign bit of the stored int32
    assert pack(q).tolist() == [[expected - (1 << 32)]]
    assert unpack(pack(q)).tolist() == q.tolist()


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 3))
def test_pack_and_unpack_are_inverse(seed: int, outputs: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-8, 8, (outputs, 32 * groups), generator=generator)
    packed = pack(q)
    assert packed.dtype == torch.int32
    assert packed.shape == (outputs, 4 * groups)
    assert torch.equal(unpack(packed), q.to(torch.int8))


def test_dequantize_equals_the_formula_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(-8, 8, (3, 64), generator=generator)
    scale = (torch.rand(3, 2, generator=generator) * 0.1).bfloat16()
    found = dequantize(PackedWeight(pack(q), scale))
    assert found.dtype == torch.bfloat16
    for o in range(3):
        for i in range(64):
            wanted = torch.tensor(float(q[o, i])).bfloat16() * scale[o, i // 32]
            assert found[o, i] == wanted


def test_quantize_rounds_to_the_nearest_step_and_survives_zero_groups() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    weight[1, 32:] = 0.0
    packed = quantize(weight)
    absmax = weight.view(4, 2, 32).abs().amax(-1)
    assert torch.equal(packed.scale, (absmax / 7.5).bfloat16())
    error = (dequantize(packed).float() - weight).abs().view(4, 2, 32)
    # Half a step, or a full one at +7.5 steps (clamped to 7), plus bf16's rounding of the product.
    assert bool((error <= packed.scale.float()[..., None] * 0.55 + 1e-6).all())
    assert dequantize(packed)[1, 32:].abs().max() == 0


def test_the_largest_weight_of_a_group_is_seven_and_a_half_steps() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :6] = torch.tensor([-7.5, 7.5, -7.4, 2.5, 1.5, -0.4])
    packed = quantize(weight)
    assert packed.scale.tolist() == [[1.0]]
    assert unpack(packed.packed)[0, :6].tolist() == [-8, 7, -7, 2, 2, 0]


def stored(folder: Path) -> torch.Tensor:
    packed = quantize(torch.randn(6, 128, generator=torch.Generator().manual_seed(3)))
    save_file(
        {"p.weight_packed": packed.packed, "p.weight_scale": packed.scale},
        folder / "model.safetensors",
    )
    return dequantize(packed)


def test_read_linear_slices_rows_and_whole_groups_of_columns(tmp_path: Path) -> None:
    whole = stored(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(read_linear(checkpoint, "p"), whole)
    assert torch.equal(read_linear(checkpoint, "p", rows=slice(2, 4)), whole[2:4])
    assert torch.equal(read_linear(checkpoint, "p", cols=slice(32, 96)), whole[:, 32:96])


def test_cutting_a_group_says_what_to_choose(tmp_path: Path) -> None:
    stored(tmp_path)
    with pytest.raises(ConfigError, match=r"inputs 16 to 32 of p cut an INT4 group of 32.*tp"):
        read_linear(Checkpoint.open(tmp_path), "p", cols=slice(16, 32))
