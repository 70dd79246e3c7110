from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from kdray.kernels.reference_fused import rotate
from kdray.model.config import Yarn
from kdray.model.rope import Rope, cos_sin_scale, rope_frequencies

KIMI_YARN = Yarn(
    factor=64.0,
    original_max_position_embeddings=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    attention_factor=None,
)


def huggingface(dim: int, theta: float, yarn: Yarn | None) -> DeepseekV3RotaryEmbedding:
    scaling = None
    if yarn is not None:
        given = {k: v for k, v in dataclasses.asdict(yarn).items() if v is not None}
        scaling = {"type": "yarn", **given}
    config = DeepseekV3Config(
        qk_rope_head_dim=dim, rope_theta=theta, rope_scaling=scaling, max_position_embeddings=262144
    )
    return DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize(
    ("dim", "theta", "yarn"),
    [
        (64, 50000.0, KIMI_YARN),
        (64, 50000.0, dataclasses.replace(KIMI_YARN, beta_fast=1.0)),
        (64, 10000.0, dataclasses.replace(KIMI_YARN, factor=40.0, mscale=0.707)),
        (64, 10000.0, dataclasses.replace(KIMI_YARN, mscale=None, mscale_all_dim=None)),
        (64, 10000.0, dataclasses.replace(KIMI_YARN, attention_factor=1.25)),
        (16, 10000.0, None),
    ],
)
def test_frequencies_and_scale_equal_transformers(
    dim: int, theta: float, yarn: Yarn | None
) -> None:
    oracle = huggingface(dim, theta, yarn)
    torch.testing.assert_close(
        rope_frequencies(dim, theta, yarn), oracle.inv_freq, rtol=1e-6, atol=0
    )
    assert cos_sin_scale(yarn) == pytest.approx(oracle.attention_scaling, rel=1e-12)


def test_kimi_blends_pairs_8_to_20() -> None:
    plain = rope_frequencies(64, 50000.0, None)
    yarn = rope_frequencies(64, 50000.0, KIMI_YARN)
    assert torch.equal(yarn[:9], plain[:9])
    torch.testing.assert_close(yarn[20:], plain[20:] / 64)
    middle = (plain / 64 < yarn) & (yarn < plain)
    assert middle.nonzero().flatten().tolist() == list(range(9, 20))


def test_an_empty_blend_range_is_one_step() -> None:
    """Over a context of 6 no pair turns once, so the blend begins and ends at pair 0."""
    yarn = dataclasses.replace(
        KIMI_YARN, original_max_position_embeddings=6, beta_fast=1.0, factor=4.0
    )
    plain, found = rope_frequencies(8, 10000.0, None), rope_frequencies(8, 10000.0, yarn)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[0], plain[0])
    torch.testing.assert_close(found[1:], plain[1:] / 4)


def test_rotation_turns_interleaved_pairs() -> None:
    rope = Rope(rope_frequencies(6, 100.0, None), torch.tensor(1.0))
    x = torch.randn(4, 2, 6)
    position = torch.tensor([0, 1, 5, 1000])
    found = rotate(x, rope.turns(position)[:, None])
    for t, p in enumerate(position.tolist()):
        for i in range(3):
            angle = p * float(rope.frequency[i])
            cos, sin = math.cos(angle), math.sin(angle)
            a, b = x[t, :, 2 * i], x[t, :, 2 * i + 1]
            torch.testing.assert_close(found[t, :, 2 * i], a * cos - b * sin, rtol=0, atol=1e-4)
            torch.testing.assert_close(found[t, :, 2 * i + 1], b * cos + a * sin, rtol=0, atol=1e-4)


def test_magnitude_multiplies_and_bf16_is_rounded_once() -> None:
    turns = Rope(rope_frequencies(8, 100.0, None), torch.tensor(1.5)).turns(torch.tensor([3, 9]))
    x = torch.randn(2, 8).bfloat16()
    found = rotate(x, turns)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rotate(x.float(), turns).bfloat16())
    torch.testing.assert_close(rotate(x.float(), turns).norm(dim=-1), 1.5 * x.float().norm(dim=-1))
