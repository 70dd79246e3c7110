"""jobs/eval_kv_dtype.py: fp8 keeps the demo model's greedy tokens, and a broken scale is found."""

from __future__ import annotations

import json
from typing import Any

import eval_kv_dtype
import pytest
import torch
from eval_kv_dtype import Difference
from torch import Tensor

from kdray.kernels import latent_rows, reference_fused

FEW = ["--device", "cpu", "--threads", "1", "--per-kind", "6", "--max-tokens", "96"]


def rows_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return [row["metrics"] for row in rows]


def test_texts_are_compared_until_they_part() -> None:
    texts, others = [[1, 2, 3], [4, 5], [6], [7, 8]], [[1, 2, 3], [4, 9], [6, 1], [0, 8]]
    found = Difference.of(texts, others)
    assert found == Difference(parted=3, tokens=3 + 2 + 2 + 1)
    assert found.per_token == 3 / 8


def test_fp8_keeps_greedy_tokens_and_accept_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert eval_kv_dtype.main(FEW) == 0
    bf16, fp8, beside = rows_of(capsys)
    assert bf16["texts_differing_from_plain"] <= 1 and fp8["texts_differing_from_plain"] <= 1
    assert bf16["accept_length"] > 3 and beside["parted_per_token"] < 0.005


def test_scales_a_quarter_off_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(latent: Tensor, key: Tensor) -> Tensor:
        rows = latent_rows.quantised(latent, key)
        at = latent.shape[1] + 2 * key.shape[1]
        scale = rows[:, at : at + 4].contiguous().view(torch.float32)
        rows[:, at : at + 4] = (1.25 * scale).view(torch.uint8)
        return rows

    monkeypatch.setattr(reference_fused, "quantised", off)
    assert eval_kv_dtype.main(FEW) == 1
    *_, beside = rows_of(capsys)
    assert beside["parted"] > 2
