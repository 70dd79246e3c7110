"""A target shaped like Kimi K2.6 and a drafter for it, for dummy weights.

Its text means nothing: what counts is what a step costs. Real head sizes (latent 512, rope 64, nope
and value 128), 8 heads as on one of eight ranks, 12 layers of width 2048, 64 experts of 512 in
INT4.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

TARGET: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "rope_theta": 50000.0,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                },
            },
        },
    },
}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "max_position_embeddings": 4096,
    "vocab_size": 163840,
    "block_size": 8,
    "num_target_layers": 12,
    "tie_word_embeddings": False,
    "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 5, 10]},
}


def write_folders(root: Path) -> tuple[Path, Path]:
    """The target's folder and the drafter's: config.json alone."""
    target, drafter = root / "target", root / "drafter"
    for folder, config in ((target, TARGET), (drafter, DRAFTER)):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    return target, drafter


def temporary_folders() -> tuple[tempfile.TemporaryDirectory[str], Path, Path]:
    home = tempfile.TemporaryDirectory(prefix="kdray-random-")
    return home, *write_folders(Path(home.name))
