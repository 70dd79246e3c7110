"""A tiny checkpoint in the layout of Kimi K2.6, by the job that writes them of any size."""

from __future__ import annotations

from pathlib import Path

from jobs import make_checkpoint

FIELDS = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
SET = ",".join(f"{name}={value}" for name, value in FIELDS.items())


def write(folder: Path, *options: str) -> Path:
    """options of jobs/make_checkpoint.py."""
    assert make_checkpoint.main(["--out", str(folder), "--set", SET, *options]) == 0
    return folder
