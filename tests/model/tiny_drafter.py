"""Small random DFlash folders, and the facts a drafter needs of its target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def draft_config(**changes: Any) -> dict[str, Any]:
    """A two-layer drafter of width 32 for a target of 6 layers and 96 tokens."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": 96,
        "block_size": 5,
        "num_target_layers": 6,
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 3, 4]},
    }
    return {**config, **changes}


def draft_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights under z-lab's names, scaled so that every part of the forward counts."""
    generator = torch.Generator().manual_seed(seed)
    width, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=generator) * 1.5 / cols**0.5

    def norm(size: int) -> Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=generator)

    taps = len(config["dflash_config"].get("target_layer_ids", [0]))
    tensors = {
        "fc.weight": matrix(width, taps * width),
        "hidden_norm.weight": norm(width),
        "norm.weight": norm(width),
    }
    for layer in range(config["num_hidden_layers"]):
        root = f"layers.{layer}"
        tensors |= {
            f"{root}.self_attn.q_proj.weight": matrix(query, width),
            f"{root}.self_attn.k_proj.weight": matrix(key, width),
            f"{root}.self_attn.v_proj.weight": matrix(key, width),
            f"{root}.self_attn.o_proj.weight": matrix(width, query),
            f"{root}.self_attn.q_norm.weight": norm(dim) * 2.0,
            f"{root}.self_attn.k_norm.weight": norm(dim) * 2.0,
            f"{root}.input_layernorm.weight": norm(width),
            f"{root}.post_attention_layernorm.weight": norm(width),
            f"{root}.mlp.gate_proj.weight": matrix(inner, width),
            f"{root}.mlp.up_proj.weight": matrix(inner, width),
            f"{root}.mlp.down_proj.weight": matrix(width, inner),
        }
    return tensors


def write_drafter(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> Path:
    """A DFlash folder; random tensors unless given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = draft_tensors(config) if tensors is None else dict(tensors)
    save_file(stored, folder / "model.safetensors")
    return folder


def write_target(folder: Path, config: Mapping[str, Any], seed: int = 1) -> Path:
    """What a drafter reads of its target: config.json and the two tables."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    shape = (config["vocab_size"], config["hidden_size"])
    tables = {
        "model.embed_tokens.weight": torch.randn(shape, generator=generator),
        "lm_head.weight": torch.randn(shape, generator=generator) * 0.5,
    }
    save_file(tables, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_target_config(config)))
    return folder


def _target_config(draft: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": draft["vocab_size"],
        "hidden_size": draft["hidden_size"],
        "num_hidden_layers": draft["num_target_layers"],
        "num_attention_heads": 2,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "eos_token_id": 0,
    }
