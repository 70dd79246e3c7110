"""The DFlash network's files and formulas: config, tensors, rope, and Qwen3 itself as an oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from kdray.errors import CheckpointError, UnsupportedModel
from kdray.kernels.attention_batch import DraftAttentionBatch
from kdray.kernels.ops import load_ops
from kdray.model.dflash import DFlashNetwork, LayerContext
from kdray.model.dflash_config import DFlashConfig, DraftVisibility, default_target_layer_ids
from kdray.model.dflash_weights import load_weights
from kdray.model.draft_rope import DraftRope
from tests.model.tiny_drafter import draft_config, draft_tensors, write_drafter

CPU = torch.device("cpu")
KIMI_YARN = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def read(folder: Path, **changes: Any) -> DFlashConfig:
    return DFlashConfig.from_folder(write_drafter(folder, draft_config(**changes), tensors={}))


def dflash(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**draft_config()["dflash_config"], **changes}}


def test_kimis_taps_are_the_published_ones() -> None:
    assert default_target_layer_ids(61, 6) == (1, 12, 24, 35, 47, 58)
    assert default_target_layer_ids(36, 1) == (18,)


def test_config_fields(tmp_path: Path) -> None:
    config = read(tmp_path, rope_scaling=KIMI_YARN, rope_theta=50000)
    assert config.block_size == 5 and config.mask_token_id == 95
    assert config.target_layer_ids == (1, 3, 4)
    assert config.rope_theta == 50000.0
    assert config.yarn is not None and config.yarn.factor == 64.0
    assert config.layers == (DraftVisibility(causal=False, window=None),) * 2


def test_fields_may_stand_inside_dflash_config(tmp_path: Path) -> None:
    config = read(tmp_path, block_size=None, **dflash(block_size=8, target_layer_ids=None))
    assert config.block_size == 8
    assert config.target_layer_ids == (1, 3)


def test_rope_parameters_of_transformers_5(tmp_path: Path) -> None:
    rope = {"rope_theta": 5e5, **KIMI_YARN, "rope_type": "yarn"}
    config = read(tmp_path, rope_theta=None, rope_parameters=rope)
    assert config.rope_theta == 5e5 and config.yarn is not None


def test_sliding_layers_are_causal_unless_told_otherwise(tmp_path: Path) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
    assert read(tmp_path / "a", **layers).layers == (
        DraftVisibility(causal=True, window=7),
        DraftVisibility(causal=False, window=None),
    )
    assert read(tmp_path / "b", **layers, is_causal=False).layers[0] == DraftVisibility(
        causal=False, window=7
    )
    off = read(tmp_path / "c", **layers, use_sliding_window=False)
    assert off.layers[0] == DraftVisibility(causal=True, window=None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dflash(projector_type="domino"), "projector_type 'domino' is not supported yet"),
        (dflash(markov_rank=64), "markov_rank are not supported yet"),
        (dflash(enable_confidence_head=True), "enable_confidence_head are not supported yet"),
        (dflash(conv_kernel_size=2), "conv_kernel_size are not supported yet"),
        (dflash(selector_rank=256), "selector_rank are not supported yet"),
        (dflash(lilicorr_rank=8), "lilicorr_rank are not supported yet"),
        (dflash(output_multiplier=0.2), "output_multiplier are not supported yet"),
        ({"draft_vocab_size": 32}, "draft_vocab_size are not supported yet"),
        ({"aux_hidden_state_layer_ids": [1]}, "speculators format"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be false"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_scaling": {**KIMI_YARN, "truncate": False}}, "truncate"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer type 'chunked_attention'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_target_layers": None}, "num_target_layers is missing"),
        ({"block_size": None}, "block_size is missing"),
        ({"block_size": 1}, "block_size must be an integer of at least 2"),
        ({"intermediate_size": "48"}, "intermediate_size must be an integer of at least 1"),
        ({"num_key_value_heads": 3}, "is not a multiple"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"layer_types": ["full_attention"]}, "one entry for each of the 2 layers"),
        (dflash(mask_token_id=96), "mask_token_id must be a token id below 96"),
        (dflash(mask_token_id=None), "mask_token_id must be a token id"),
        (dflash(target_layer_ids=[1, 6]), "must lie in 0 .. 5"),
    ],
)
def test_broken_configs_name_the_field(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path, **changes)


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        DFlashConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"num_hidden_layers": 2}}')
    with pytest.raises(CheckpointError, match="a target's; a drafter's folder has a dflash_config"):
        DFlashConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        DFlashConfig.from_folder(tmp_path)


def renamed(kind: str) -> dict[str, torch.Tensor]:
    tensors = draft_tensors(draft_config())
    if kind == "model.":
        return {f"model.{name}": tensor for name, tensor in tensors.items()}
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    return tensors


@pytest.mark.parametrize("kind", ["model.", "encoder."])
def test_other_spellings_of_names_are_the_same_drafter(tmp_path: Path, kind: str) -> None:
    plain = write_drafter(tmp_path / "plain", draft_config())
    other = write_drafter(tmp_path / "other", draft_config(), renamed(kind))
    config = DFlashConfig.from_folder(plain)
    wanted = load_weights(plain, config, torch.float32, CPU)
    found = load_weights(other, config, torch.float32, CPU)
    assert torch.equal(found.fc, wanted.fc)
    assert torch.equal(found.hidden_norm.weight, wanted.hidden_norm.weight)
    assert torch.equal(found.layers[1].qkv, wanted.layers[1].qkv)


def broken(kind: str) -> dict[str, torch.Tensor]:
    tensors = draft_tensors(draft_config())
    if kind == "missing":
        del tensors["layers.1.mlp.up_proj.weight"]
    elif kind == "misshaped":
        tensors["fc.weight"] = torch.zeros(32, 64)
    else:
        tensors["prefix_gru.weight_ih"] = torch.zeros(2, 2)
    return tensors


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("missing", CheckpointError, "layers.1.mlp.up_proj.weight is missing"),
        ("misshaped", CheckpointError, r"fc.weight has shape \[32, 64\] where \[32, 96\]"),
        ("extra", UnsupportedModel, "prefix_gru.weight_ih"),
    ],
)
def test_tensors_are_checked_by_name_and_shape(
    tmp_path: Path, kind: str, error: type[Exception], said: str
) -> None:
    folder = write_drafter(tmp_path, draft_config(), broken(kind))
    with pytest.raises(error, match=said):
        load_weights(folder, DFlashConfig.from_folder(folder), torch.float32, CPU)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        KIMI_YARN,
        {**KIMI_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        {k: v for k, v in KIMI_YARN.items() if not k.startswith("mscale")},
        {**KIMI_YARN, "attention_factor": 1.25},
    ],
)
def test_rope_turns_heads_as_qwen3_does(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    fields = {"rope_theta": 50000.0, "rope_scaling": scaling}
    config = read(tmp_path, **fields)
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(head_dim=config.head_dim, hidden_size=32, num_attention_heads=4, **fields)
    )
    position = torch.tensor([[0, 1, 63, 5000]])
    heads = torch.randn(1, 4, 3, config.head_dim)
    rope = DraftRope(config.head_dim, config.rope_theta, config.yarn, CPU)
    cos, sin = theirs(heads, position)
    wanted, _ = apply_rotary_pos_emb(heads, heads, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(rope.at(position).apply(heads), wanted, atol=2e-4, rtol=1e-4)


def test_without_context_and_causal_it_is_qwen3(tmp_path: Path) -> None:
    fields = draft_config(is_causal=True)
    folder = write_drafter(tmp_path, fields)
    config = DFlashConfig.from_folder(folder)
    weights = load_weights(folder, config, torch.float32, CPU)
    network = DFlashNetwork(config, weights, load_ops(CPU))
    block, position = torch.randn(2, 5, 32), torch.arange(5).repeat(2, 1)
    batch = DraftAttentionBatch(
        end=torch.zeros(2, dtype=torch.int32),
        page_table=torch.zeros(2, 1, dtype=torch.int32),
        page_size=4,
        causal=True,
        window=None,
    )
    contexts = [LayerContext(cache=torch.zeros(4, 2, 2, 16), batch=batch) for _ in range(2)]
    found = network.draft(block, position, contexts)
    torch.testing.assert_close(found, _qwen3(fields, block)[:, 1:], atol=1e-4, rtol=1e-4)


def _qwen3(fields: dict[str, Any], block: torch.Tensor) -> torch.Tensor:
    names = ("architectures", "dflash_config", "block_size", "num_target_layers", "is_causal")
    shared = {name: value for name, value in fields.items() if name not in names}
    model = Qwen3Model(Qwen3Config(**shared, attn_implementation="eager")).eval()
    tensors = draft_tensors(fields)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["embed_tokens.weight"]
    assert sorted(unexpected) == ["fc.weight", "hidden_norm.weight"]
    with torch.no_grad():
        hidden: torch.Tensor = model(inputs_embeds=block).last_hidden_state
    return hidden
