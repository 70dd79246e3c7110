"""Latents in fp8 through the whole engine on a GPU: its kernels take them, and the text stays."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kdray.config import EngineConfig
from kdray.engine import build_verifier
from kdray.facts import resolve
from kdray.kernels import cuda_attention, latent_rows
from kdray.kernels.ops import load_ops

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs"))

import eval_kv_dtype

pytestmark = pytest.mark.gpu


def test_the_kernels_take_the_cache_of_a_rank() -> None:
    config = EngineConfig(
        device="cuda", dtype="bfloat16", kv_dtype="fp8", drafter="none", num_pages=8
    )
    facts = resolve(config)
    cache = build_verifier(config, facts, load_ops(facts.device)).cache
    model, layer = facts.model, cache.layers[0]
    width = model.kv_lora_rank + model.qk_rope_head_dim
    query = torch.zeros(4, 8, width, dtype=torch.bfloat16, device="cuda")
    assert latent_rows.is_fp8(layer) and layer.is_contiguous()
    assert cuda_attention.takes(query, layer, config.page_size, model.kv_lora_rank)
    plain = resolve(replace(config, kv_dtype="bf16")).kv_row
    assert layer.shape[1] < plain.width * plain.dtype.itemsize


@pytest.mark.parametrize("budget", ["8", "32"])
def test_fp8_keeps_greedy_tokens_and_accept_lengths(
    budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In captured rounds. Over either cache few texts of trees part from plain decoding's, at
    near-ties, which bfloat16's sums decide by how many rows a step has."""
    assert eval_kv_dtype.main(["--device", "cuda", "--per-kind", "24", "--budget", budget]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    bf16, fp8, _ = (row["metrics"] for row in rows)
    texts = rows[0]["params"]["texts"]
    assert fp8["texts_differing_from_plain"] <= bf16["texts_differing_from_plain"] + 0.1 * texts
