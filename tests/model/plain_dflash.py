"""DFlash written as plainly as it can be: no pages, no batches, every key looked at one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def draft_logits(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tables: Mapping[str, Tensor],
    features: Tensor,
    root: int,
) -> Tensor:
    """Logits [L, V] float64 behind `root`, given the features [C, F] of all tokens before it."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    embedding = tables["model.embed_tokens.weight"].double()
    eps, size = config["rms_norm_eps"], config["block_size"]
    tokens = [root] + [config["dflash_config"]["mask_token_id"]] * (size - 1)
    known = _norm(features.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    block = embedding[tokens]
    for layer in range(config["num_hidden_layers"]):
        root_name = f"layers.{layer}."
        own = {n.removeprefix(root_name): w for n, w in weights.items() if n.startswith(root_name)}
        normed = _norm(block, own["input_layernorm.weight"], eps)
        block = block + _attention(config, layer, own, known, normed)
        normed = _norm(block, own["post_attention_layernorm.weight"], eps)
        gate, up = normed @ own["mlp.gate_proj.weight"].T, normed @ own["mlp.up_proj.weight"].T
        block = block + (gate * torch.sigmoid(gate) * up) @ own["mlp.down_proj.weight"].T
    return _norm(block[1:], weights["norm.weight"], eps) @ tables["lm_head.weight"].double().T


def _attention(
    config: Mapping[str, Any], layer: int, own: Mapping[str, Tensor], known: Tensor, block: Tensor
) -> Tensor:
    eps, dim = config["rms_norm_eps"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    source = torch.cat([known, block])
    first = len(known)
    mixed = torch.zeros(len(block), heads * dim, dtype=torch.float64)
    for head in range(heads):
        group = head // (heads // groups)
        query_rows = slice(head * dim, (head + 1) * dim)
        key_rows = slice(group * dim, (group + 1) * dim)
        values = source @ own["self_attn.v_proj.weight"][key_rows].T
        keys = source @ own["self_attn.k_proj.weight"][key_rows].T
        keys = _norm(keys, own["self_attn.k_norm.weight"], eps)
        queries = block @ own["self_attn.q_proj.weight"][query_rows].T
        queries = _norm(queries, own["self_attn.q_norm.weight"], eps)
        for slot in range(len(block)):
            at = first + slot
            seen = [p for p in range(len(source)) if _sees(config, layer, at, p)]
            query = _turn(config, queries[slot], at)
            scores = torch.stack([query @ _turn(config, keys[p], p) for p in seen]) / dim**0.5
            mixed[slot, query_rows] = scores.softmax(0) @ values[seen]
    return mixed @ own["self_attn.o_proj.weight"].T


def _sees(config: Mapping[str, Any], layer: int, query: int, key: int) -> bool:
    types = config.get("layer_types")
    sliding = types is not None and types[layer] == "sliding_attention"
    causal = config.get("is_causal", sliding)
    if causal and key > query:
        return False
    return not sliding or abs(query - key) < config["sliding_window"]


def _turn(config: Mapping[str, Any], head: Tensor, position: int) -> Tensor:
    """Half-split rotation of one head, pair by pair, as complex numbers."""
    half = config["head_dim"] // 2
    pairs = torch.complex(head[:half], head[half:])
    angles = [position * _frequency(config, i) for i in range(half)]
    turned = pairs * torch.tensor([complex(math.cos(a), math.sin(a)) for a in angles])
    return torch.cat([turned.real, turned.imag])


def _frequency(config: Mapping[str, Any], pair: int) -> float:
    dim, theta = config["head_dim"], config["rope_theta"]
    plain = theta ** (-2 * pair / dim)
    yarn = config.get("rope_scaling")
    if yarn is None:
        return plain
    length = yarn["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_of(yarn["beta_slow"])), dim - 1)
    slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
    return plain * (1 - slowed) + plain / yarn["factor"] * slowed


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight
