"""A checkpoint as check_full_width writes it, at tiny widths."""

from __future__ import annotations

import argparse
from pathlib import Path

import wide_checkpoint
from make_checkpoint import KIMI, read_config

from kdray.config import EngineConfig

LAYERS, EXPERTS, VOCAB = 3, 16, 64
SET = (
    f"hidden_size=256,intermediate_size=96,moe_intermediate_size=64,vocab_size={VOCAB},"
    "num_attention_heads=4,q_lora_rank=48,kv_lora_rank=32,qk_nope_head_dim=16,qk_rope_head_dim=8,"
    "v_head_dim=16,num_experts_per_tok=4"
)
TOKENS = wide_checkpoint.tokens_in_play(VOCAB)


def write_wide(path: Path) -> Path:
    fields = read_config(KIMI, f"num_hidden_layers={LAYERS},n_routed_experts={EXPERTS},{SET}")
    options = argparse.Namespace(shards=3, seed=0, threads=2, draft_layers=1)
    wide_checkpoint.write(path, fields, options)
    return path


def config_of(folder: Path, dtype: str) -> EngineConfig:
    return EngineConfig(
        model=str(folder / "target"),
        drafter=str(folder / "drafter"),
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]
        budget=6,
        max_requests=4,
        max_model_len=64,
    )
