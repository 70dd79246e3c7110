"""Rows to draw from, by every kind of SamplingParams."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kdray.core.request import SamplingParams
from kdray.kernels.ops import SamplingRows
from kdray.kernels.reference_sampling import sample_tokens

PLAIN = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=30.0),
    SamplingParams(temperature=1e-40),
]
FILTERED = [
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.3, top_k=50),
    SamplingParams(temperature=1.0, top_k=100_000),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=0.7, min_p=0.05),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.8),
    SamplingParams(temperature=5.0, top_k=3000, top_p=0.95, min_p=0.001),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.1),
]
ADJUSTED = [
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=0.9, repetition_penalty=0.5, top_k=9),
    SamplingParams(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.7),
    SamplingParams(logit_bias=((3, 50.0), (1, -2.5), (3, 0.125), (10**6, 9.0))),
    SamplingParams(temperature=1.0, min_tokens=9, logit_bias=((0, 100.0),)),
]
WAYS = PLAIN + FILTERED + ADJUSTED


def rows_of(ways: list[SamplingParams], vocab: int, seed: int = 0) -> SamplingRows:
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, vocab + 2, count).tolist()

    return SamplingRows(
        params=ways,
        seed=rng.integers(0, 2**63 - 1, len(ways)).tolist(),
        position=rng.integers(0, 2**31 - 1, len(ways)).tolist(),
        history=[(tokens(30), tokens(8)) if way.uses_history else None for way in ways],
        end_token_ids=[frozenset({0, 1, vocab + 7})] * len(ways),
    )


def logits_of(kind: str, rows: int, vocab: int, seed: int = 0) -> Tensor:
    """[rows, vocab] float32 with at least one finite number beside the end tokens 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, vocab, generator=generator)
    if kind == "ties":
        return (normal * 2).round()
    if kind == "sure":
        normal *= 6
    if kind == "holes":
        normal[torch.rand(rows, vocab, generator=generator) < 0.3] = -torch.inf
        normal[torch.rand(rows, vocab, generator=generator) < 0.05] = torch.nan
        normal[:, -1] = 0.5
    return normal * 3


def expected(logits: Tensor, rows: SamplingRows) -> list[int]:
    return sample_tokens(logits.float().cpu().numpy(), rows).tolist()
