from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kdray.errors import CheckpointError, UnsupportedModel
from kdray.model.config import ModelConfig
from tests.model.tiny import DEEPSEEK, INT4_SCHEME, KIMI, YARN

PUBLISHED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "attention_bias": False,
}
PLAIN = KIMI | PUBLISHED | {"model_type": "kimi_k2"}


def write(folder: Path, config: dict[str, Any], **generation: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_reads_a_plain_folder(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path, PLAIN))
    assert (config.hidden_size, config.q_lora_rank, config.kv_width) == (64, 24, 40)
    assert config.yarn is not None
    assert (config.yarn.factor, config.yarn.beta_fast) == (4.0, 32.0)
    assert [config.is_moe(layer) for layer in range(3)] == [False, True, True]
    assert config.quantization == "none"


def test_reads_nested_kimi_k25_with_quantization_inside_or_outside(tmp_path: Path) -> None:
    inside = {"model_type": "kimi_k25", "text_config": PLAIN | {"quantization_config": INT4_SCHEME}}
    outside = {
        "model_type": "kimi_k25",
        "text_config": PLAIN,
        "quantization_config": INT4_SCHEME,
    }
    first = ModelConfig.from_folder(write(tmp_path, inside))
    second = ModelConfig.from_folder(write(tmp_path, outside))
    assert first == second
    assert first.quantization == "int4"
    assert first.hidden_size == 64


def test_rope_parameters_of_transformers_5_mean_the_same(tmp_path: Path) -> None:
    old = ModelConfig.from_folder(write(tmp_path, PLAIN))
    renamed = {key: value for key, value in PLAIN.items() if not key.startswith("rope_")}
    yarn = {key: value for key, value in YARN.items() if key != "type"}
    renamed["rope_parameters"] = yarn | {"rope_type": "yarn", "rope_theta": 50000.0}
    assert ModelConfig.from_folder(write(tmp_path, renamed)) == old


def test_no_scaling_is_plain_rope(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path, DEEPSEEK | {"model_type": "deepseek_v3"}))
    assert config.yarn is None
    assert config.rope_theta == 10000.0


def test_end_tokens_of_all_files_are_joined(tmp_path: Path) -> None:
    nested = {"model_type": "kimi_k25", "text_config": PLAIN, "eos_token_id": [3]}
    config = ModelConfig.from_folder(write(tmp_path, nested, eos_token_id=[4, 5]))
    assert config.eos_token_ids == {2, 3, 4, 5}


def test_a_null_query_rank_means_no_query_latent(tmp_path: Path) -> None:
    assert (
        ModelConfig.from_folder(write(tmp_path, PLAIN | {"q_lora_rank": None})).q_lora_rank is None
    )


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size",
        "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
        "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob", "rms_norm_eps",
        "max_position_embeddings", "rope_theta",
    ],
)  # fmt: skip
def test_a_missing_field_is_named_with_its_file(tmp_path: Path, field: str) -> None:
    write(tmp_path, {key: value for key, value in PLAIN.items() if key != field})
    with pytest.raises(CheckpointError, match=rf"config\.json: field {field} is missing"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "'qwen3' is not supported; kdray serves deepseek_v3, kimi_k2"),
        ({"model_type": "deepseek_v2"}, "'deepseek_v2' is not supported"),
        ({"model_type": None}, "None is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'.*only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k3"}}, "'kimi_k3'"),
    ],
)
def test_other_architectures_are_unsupported(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_folder(write(tmp_path, PLAIN | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size must be an integer of at least 1, found '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a number greater than 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"eos_token_id": "end"}, "eos_token_id must be an integer or a list"),
        ({"eos_token_id": 96}, "outside the vocabulary of 96"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"q_lora_rank": 25, "kv_lora_rank": 31}, "kv_lora_rank, q_lora_rank must be even"),
        ({"n_group": 3}, "n_group 3 must divide n_routed_experts 8"),
        ({"topk_group": 2}, "topk_group 2 exceeds n_group 1"),
        ({"n_group": 4}, "num_experts_per_tok 3 exceeds the experts of topk_group 1"),
        ({"rope_scaling": YARN | {"factor": None}}, "field factor is missing"),
        ({"rope_scaling": 3}, "rope_scaling must be an object"),
        ({"model_type": "kimi_k25"}, "text_config is missing"),
    ],
)
def test_wrong_values_say_what_is_wanted(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_folder(write(tmp_path, PLAIN | change))


def _scheme(**weights: Any) -> dict[str, Any]:
    scheme = copy.deepcopy(INT4_SCHEME)
    scheme["config_groups"]["group_0"]["weights"].update(weights)  # type: ignore[index]
    return scheme


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quant_method = 'fp8'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method = 'gptq'"),
        (INT4_SCHEME | {"format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized'"),
        (INT4_SCHEME | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (_scheme(group_size=128), "group_size = 128"),
        (_scheme(num_bits=8), "num_bits = 8"),
        (_scheme(symmetric=False), "symmetric = False"),
        (_scheme(type="float"), "type = 'float'"),
        (_scheme(actorder="weight"), "actorder = 'weight'"),
        ("int4", "quant_method = None"),
    ],
)
def test_other_quantizations_are_unsupported(tmp_path: Path, scheme: object, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as error:
        ModelConfig.from_folder(write(tmp_path, PLAIN | {"quantization_config": scheme}))
    assert "pack-quantized INT4" in str(error.value)


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing; give the folder"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[]", "object")])
def test_broken_json_is_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_folder(tmp_path)
