"""Dimensions of the demo target and drafter, and their config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kdray.demo.text.draw import hash_of
from kdray.demo.tokenizer import VOCAB_SIZE, DemoTokenizer

MASK_TOKEN = "[UNK]"


@dataclass(frozen=True)
class YarnShape:
    """YaRN numbers; training, transformers and the product read the same ones."""

    factor: float = 4.0
    original_positions: int = 512
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class TargetShape:
    """A small DeepSeek-V3: MLA, layer 0 dense, then routed experts and one shared expert."""

    hidden: int = 256
    layers: int = 6
    heads: int = 8
    q_rank: int = 128
    kv_rank: int = 64
    nope: int = 32
    rope: int = 16
    value: int = 32
    dense_width: int = 768
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 128
    routed_scaling: float = 1.5
    eps: float = 1e-6
    theta: float = 10_000.0
    positions: int = 2048
    vocab: int = VOCAB_SIZE
    yarn: YarnShape = YarnShape()

    @property
    def query(self) -> int:
        """Width of one query head, rope part included."""
        return self.nope + self.rope


@dataclass(frozen=True)
class DrafterShape:
    """A small DFlash drafter for a ``TargetShape``."""

    hidden: int = 256
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    width: int = 640
    block: int = 8
    eps: float = 1e-6
    theta: float = 10_000.0
    positions: int = 2048
    feature_layers: tuple[int, ...] = (1, 3, 4, 5)

    @property
    def depth(self) -> int:
        """Tokens drafted in one pass: the block without its root."""
        return self.block - 1


def target_config(shape: TargetShape, tokenizer: DemoTokenizer) -> dict[str, Any]:
    """config.json of the target."""
    special = tokenizer.special_ids
    yarn = shape.yarn
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_width,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "n_shared_experts": 1,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": shape.routed_scaling,
        "q_lora_rank": shape.q_rank,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.value,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_theta": shape.theta,
        "rope_interleave": True,
        "rope_scaling": {
            "type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        },
        "max_position_embeddings": shape.positions,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": special["[BOS]"],
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["[PAD]"],
    }


def drafter_config(
    shape: DrafterShape, target: TargetShape, tokenizer: DemoTokenizer
) -> dict[str, Any]:
    """config.json of the drafter."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "intermediate_size": shape.width,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * shape.layers,
        "attention_bias": False,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.positions,
        "vocab_size": target.vocab,
        "block_size": shape.block,
        "num_target_layers": target.layers,
        "tie_word_embeddings": False,
        "dflash_config": {
            "mask_token_id": tokenizer.special_ids[MASK_TOKEN],
            "target_layer_ids": list(shape.feature_layers),
        },
    }


def generation_config(tokenizer: DemoTokenizer) -> dict[str, Any]:
    """generation_config.json of the target."""
    special = tokenizer.special_ids
    return {
        "bos_token_id": special["[BOS]"],
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["[PAD]"],
        "do_sample": False,
    }


def seed_of(seed: int, purpose: str) -> int:
    """A seed of its own for each purpose of one run."""
    return hash_of("seed", seed, purpose)
