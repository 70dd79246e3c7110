"""Random tiny checkpoints, made by transformers, in every folder format kdray reads."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from kdray.model.int4 import dequantize, quantize

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
INT4_SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "actorder": None,
                "observer": "minmax",
            },
        }
    },
}
KIMI: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DEEPSEEK = KIMI | {
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
}


@cache
def huggingface(kind: str = "kimi") -> DeepseekV3ForCausalLM:
    """A seeded random model: "kimi", "deepseek", "plain_query" (no query latent), "wide_tp",
    "wide_latent" (the least sizes the attention kernel takes)."""
    fields = {
        "kimi": KIMI,
        "deepseek": DEEPSEEK,
        "plain_query": KIMI | {"q_lora_rank": None, "rope_scaling": None},
        "wide_tp": KIMI | {"moe_intermediate_size": 128, "num_attention_heads": 8,
                           "num_key_value_heads": 8},
        "wide_latent": KIMI | {"kv_lora_rank": 64, "qk_rope_head_dim": 16},
    }[kind]  # fmt: skip
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **deepcopy(fields),  # transformers writes into the dicts it is given
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights unlike 1, and weights large enough that every part shows in the logits.
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.5 if "mlp.gate" in name else 0.15)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0.0, 0.3)
    return model.requires_grad_(False)


def save_plain(folder: Path, kind: str = "kimi", max_shard_size: str = "1GB") -> Path:
    """As transformers writes it; a small max_shard_size gives several shards and an index."""
    huggingface(kind).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    """Set fields of config.json; the value `...` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in fields.items():
        if value is ...:
            config.pop(name, None)
        else:
            config[name] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, add: dict[str, Tensor] | None = None, drop: str = "") -> None:
    """Add tensors to model.safetensors, or drop the one named."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.update(add or {})
    tensors.pop(drop, None)
    save_file(tensors, path)


def save_kimi(folder: Path, plain: Path) -> Path:
    """The same model as Kimi K2.5 publishes it: nested config, prefixed names, vision parts."""
    folder.mkdir()
    text = json.loads((plain / "config.json").read_text()) | {"model_type": "kimi_k2"}
    text["rope_scaling"] = text.pop("rope_parameters")
    config = {"model_type": "kimi_k25", "text_config": text, "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"language_model.{k}": v for k, v in load_file(plain / "model.safetensors").items()}
    tensors["vision_tower.patch_embed.pos_emb.weight"] = torch.ones(2, 2)
    tensors["mm_projector.proj.0.weight"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_int4(folder: Path, plain: Path) -> DeepseekV3ForCausalLM:
    """Routed experts packed to INT4; returns a model of the dequantised weights."""
    shutil.copytree(plain, folder)
    edit_config(folder, quantization_config=INT4_SCHEME)
    stored, rounded = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if ".mlp.experts." not in name:
            stored[name] = rounded[name] = weight
            continue
        packed = quantize(weight)
        stored[f"{name}_packed"], stored[f"{name}_scale"] = packed
        stored[f"{name}_shape"] = torch.tensor(weight.shape, dtype=torch.int32)
        rounded[name] = dequantize(packed).float()
    save_file(stored, folder / "model.safetensors")
    exact = folder.parent / f"{folder.name}-dequantised"
    shutil.copytree(plain, exact)
    save_file(rounded, exact / "model.safetensors", metadata={"format": "pt"})
    return DeepseekV3ForCausalLM.from_pretrained(
        exact,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    ).eval()
