"""The facts of a model folder's config.json, checked field by field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kdray.errors import CheckpointError, UnsupportedModel
from kdray.model.json_fields import JsonFields, read_json

ARCHITECTURES = ("deepseek_v3", "kimi_k2", "kimi_k25")
INT4_GROUP = 32

Quantization = Literal["none", "int4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """The yarn extension of rope, as named in config.json; the formulas are in model/rope.py."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    attention_factor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A DeepSeek-V3-family model. Field names are config.json's.

    q_lora_rank     None: queries come from the residual stream in one projection
    yarn            None: plain rope
    num_nextn_predict_layers   layers behind the others that nobody reads; None: not said
    quantization    "int4": linears may be stored as compressed-tensors pack-quantized words
    eos_token_ids   every end token named by config.json or generation_config.json
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    num_nextn_predict_layers: int | None
    quantization: Quantization
    eos_token_ids: frozenset[int]

    @property
    def kv_width(self) -> int:
        """Numbers a token leaves in the cache of one layer: the latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json (and generation_config.json, where there is one) of a model folder."""
        path = Path(folder) / "config.json"
        top = JsonFields(read_json(path), path)
        text = _text_fields(top)
        quantization = _quantization(
            text.get("quantization_config", top.get("quantization_config")), path
        )
        config = _config(text, quantization, _eos_token_ids(Path(folder), top, text))
        _check_together(config, path)
        return config


def _text_fields(top: JsonFields) -> JsonFields:
    """The language model's own fields: Kimi K2.5 nests them beside its vision tower's."""
    model_type = top.get("model_type")
    if model_type not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{top.path}: model_type {model_type!r} is not supported; "
            f"kdray serves {', '.join(ARCHITECTURES)}"
        )
    if model_type != "kimi_k25":
        return top
    nested = top.get("text_config")
    if not isinstance(nested, dict):
        raise CheckpointError(f"{top.path}: field text_config is missing")
    text = JsonFields(nested, top.path)
    if text.get("model_type") not in ("kimi_k2", "deepseek_v3"):
        raise UnsupportedModel(
            f"{top.path}: text_config.model_type {text.get('model_type')!r} is not supported; "
            "kdray serves kimi_k2 and deepseek_v3"
        )
    return text


def _config(text: JsonFields, quantization: Quantization, eos: frozenset[int]) -> ModelConfig:
    for name, allowed in (
        ("hidden_act", "silu"),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
        ("attention_bias", False),
        ("rope_interleave", True),
        ("tie_word_embeddings", False),
    ):
        text.only(name, allowed)
    heads = text.integer("num_attention_heads")
    text.only("num_key_value_heads", heads)
    rope = _rope_fields(text)
    return ModelConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        num_hidden_layers=text.integer("num_hidden_layers"),
        num_attention_heads=heads,
        q_lora_rank=None if _is_null(text, "q_lora_rank") else text.integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        intermediate_size=text.integer("intermediate_size"),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        first_k_dense_replace=text.integer("first_k_dense_replace", at_least=0),
        n_routed_experts=text.integer("n_routed_experts"),
        n_shared_experts=text.integer("n_shared_experts"),
        num_experts_per_tok=text.integer("num_experts_per_tok"),
        n_group=text.integer("n_group", default=1),
        topk_group=text.integer("topk_group", default=1),
        norm_topk_prob=text.flag("norm_topk_prob"),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        rms_norm_eps=text.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta", default=text.get("rope_theta")),
        yarn=_yarn(rope),
        max_position_embeddings=text.integer("max_position_embeddings"),
        num_nextn_predict_layers=_prediction_layers(text),
        quantization=quantization,
        eos_token_ids=eos,
    )


def _prediction_layers(text: JsonFields) -> int | None:
    name = "num_nextn_predict_layers"
    return None if text.get(name) is None else text.integer(name, at_least=0)


def _is_null(fields: JsonFields, name: str) -> bool:
    """True where the field is written and null, which is not the same as forgotten."""
    return name in fields.values and fields.values[name] is None


def _rope_fields(text: JsonFields) -> JsonFields:
    """rope_scaling of published files, or rope_parameters as transformers 5 writes it."""
    for name in ("rope_parameters", "rope_scaling"):
        values = text.get(name)
        if values is None:
            continue
        if not isinstance(values, dict):
            raise text.wrong(name, values, "an object")
        return JsonFields(values, text.path)
    return JsonFields({}, text.path)


def _yarn(rope: JsonFields) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise UnsupportedModel(
            f"{rope.path}: rope scaling {kind!r} is not supported; kdray knows yarn and none"
        )
    rope.only("truncate", True)
    return Yarn(
        factor=rope.number("factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        attention_factor=rope.optional_number("attention_factor"),
    )


def _quantization(values: object, path: Path) -> Quantization:
    """The one scheme served: 4-bit symmetric integers in groups of 32 inputs, packed in words."""
    if values is None:
        return "none"
    found = values if isinstance(values, dict) else {}
    groups = found.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    group = groups[0] if len(groups) == 1 and isinstance(groups[0], dict) else {}
    weights = group.get("weights") or {}
    facts = {
        "quant_method": (found.get("quant_method"), "compressed-tensors"),
        "format": (found.get("format"), "pack-quantized"),
        "kv_cache_scheme": (found.get("kv_cache_scheme"), None),
        "number of config_groups": (len(groups), 1),
        "input_activations": (group.get("input_activations"), None),
        "output_activations": (group.get("output_activations"), None),
        "num_bits": (weights.get("num_bits"), 4),
        "type": (weights.get("type"), "int"),
        "symmetric": (weights.get("symmetric"), True),
        "strategy": (weights.get("strategy"), "group"),
        "group_size": (weights.get("group_size"), INT4_GROUP),
        "actorder": (weights.get("actorder"), None),
    }
    wrong = [f"{name} = {is_!r}" for name, (is_, wanted) in facts.items() if is_ != wanted]
    if wrong:
        raise UnsupportedModel(
            f"{path}: quantization_config is not supported ({', '.join(wrong)}); kdray "
            "reads unquantised weights and compressed-tensors pack-quantized INT4 (symmetric, "
            f"groups of {INT4_GROUP}, no actorder)"
        )
    return "int4"


def _eos_token_ids(folder: Path, top: JsonFields, text: JsonFields) -> frozenset[int]:
    sources = [top, text]
    generation = folder / "generation_config.json"
    if generation.exists():
        sources.append(JsonFields(read_json(generation), generation))
    tokens: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id", [])
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
            raise source.wrong("eos_token_id", value, "an integer or a list of integers")
        tokens.update(listed)
    return frozenset(tokens)


def _check_together(config: ModelConfig, path: Path) -> None:
    """Facts that only make sense side by side."""
    experts, groups = config.n_routed_experts, config.n_group
    # Rope turns pairs of numbers in place; they must not straddle two of these parts.
    paired = ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank", "q_lora_rank")
    odd = [name for name in paired if (getattr(config, name) or 0) % 2]
    problems = (
        (bool(odd), f"{', '.join(odd)} must be even"),
        (experts % groups != 0, f"n_group {groups} must divide n_routed_experts {experts}"),
        (config.topk_group > groups, f"topk_group {config.topk_group} exceeds n_group {groups}"),
        (
            config.num_experts_per_tok * groups > experts * config.topk_group,
            f"num_experts_per_tok {config.num_experts_per_tok} exceeds the experts of "
            f"topk_group {config.topk_group} groups",
        ),
        (
            any(not 0 <= token < config.vocab_size for token in config.eos_token_ids),
            f"eos_token_id {sorted(config.eos_token_ids)} is outside the vocabulary of "
            f"{config.vocab_size}",
        ),
    )
    for wrong, message in problems:
        if wrong:
            raise CheckpointError(f"{path}: {message}")
