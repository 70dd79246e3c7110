"""The facts of a DFlash drafter, read from its config.json and refused where kdray cannot serve it.

Format: a Qwen3-shaped config with a `dflash_config` part, as z-lab publishes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kdray.errors import CheckpointError, ConfigError
from kdray.model.config import Yarn
from kdray.model.json_fields import JsonFields, read_json

# Parts of younger drafters that change the forward pass; a drafter that has one must not be run
# as if it had none.
_EXTENSIONS = (
    "markov_rank",
    "enable_confidence_head",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "sample_from_anchor",
    "final_logit_softcapping",
    "draft_vocab_size",
    "swa_window_size",
)
_NEUTRAL_AT_ONE = ("output_multiplier", "input_embedding_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVisibility:
    """Which keys a block slot at position p sees, beside what lies ahead of the block.

    causal   nothing behind its own position
    window   only keys nearer than `window` positions, its own included; None: all
    """

    causal: bool
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """block_size = the root and the masked slots behind it, so depth L = block_size - 1.

    ranks   that share heads and MLPs: num_heads, num_kv_heads and intermediate_size are one rank's
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    block_size: int
    mask_token_id: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    layers: tuple[DraftVisibility, ...]
    rope_theta: float
    yarn: Yarn | None
    ranks: int = 1

    @classmethod
    def from_folder(cls, folder: str | Path) -> DFlashConfig:
        return read_config(Path(folder) / "config.json")

    @property
    def feature_size(self) -> int:
        """F: numbers that the target's layers leave of a token."""
        return len(self.target_layer_ids) * self.hidden_size

    def check_split(self, ranks: int) -> None:
        """Raise ConfigError unless so many ranks can share its work evenly."""
        sizes = (self.num_heads, self.num_kv_heads, self.intermediate_size, self.feature_size)
        if any(size % ranks for size in sizes):
            raise ConfigError(
                f"{ranks} ranks cannot share the drafter evenly, of {self.num_heads} heads, "
                f"{self.num_kv_heads} key heads, an intermediate size of {self.intermediate_size} "
                f"and {self.feature_size} features a token; use draft_tp 1"
            )

    def of_rank(self, ranks: int) -> DFlashConfig:
        """The part of each of `ranks` ranks that share it."""
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
            ranks=ranks,
        )

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Of a token's keys and values in all layers, on one rank."""
        return len(self.layers) * 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


def read_config(path: Path) -> DFlashConfig:
    """The config of a DFlash folder; CheckpointError or UnsupportedModel says what is wrong."""
    fields = _read_fields(path)
    _refuse_what_is_not_served(fields)
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    hidden_size = fields.integer("hidden_size")
    num_target_layers = fields.integer("num_target_layers")
    theta, yarn = _rope(fields)
    return DFlashConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", default=hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        vocab_size=fields.integer("vocab_size"),
        block_size=_block_size(fields),
        mask_token_id=_mask_token_id(fields),
        num_target_layers=num_target_layers,
        target_layer_ids=_target_layer_ids(fields, num_layers, num_target_layers),
        layers=_visibility(fields, num_layers),
        rope_theta=theta,
        yarn=yarn,
    )


def default_target_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The taps of a drafter that names none: evenly spread from layer 1 to the third last."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_layers))


def _read_fields(path: Path) -> JsonFields:
    """Fields of a config.json; those of `dflash_config` come before those at the top."""
    top = read_json(path)
    nested = top.get("dflash_config") or {}
    if "text_config" in top and not nested:
        raise CheckpointError(f"{path} is a target's; a drafter's folder has a dflash_config")
    if not isinstance(nested, dict):
        raise CheckpointError(f"{path}: dflash_config is not an object")
    return JsonFields({**top, **nested}, path)


def _refuse_what_is_not_served(fields: JsonFields) -> None:
    if fields.get("speculators_model_type") or fields.get("aux_hidden_state_layer_ids"):
        raise fields.refusal(
            "drafters in the speculators format are not supported yet; "
            "use the DFlash export (config.json with a dflash_config)"
        )
    projector = fields.get("projector_type", "dflash")
    if projector != "dflash":
        raise fields.refusal(f"projector_type {projector!r} is not supported yet")
    for name in _EXTENSIONS:
        if fields.get(name):
            raise fields.refusal(f"drafters with {name} are not supported yet")
    for name in _NEUTRAL_AT_ONE:
        if fields.get(name, 1) != 1:
            raise fields.refusal(f"drafters with {name} are not supported yet")
    for name in fields.values:
        if name.startswith("lilicorr"):
            raise fields.refusal(f"drafters with {name} are not supported yet")
    if fields.get("tie_word_embeddings", False):
        raise fields.refusal(
            "tie_word_embeddings must be false: a DFlash drafter has no tables of its own"
        )
    if fields.get("attention_bias", False):
        raise fields.refusal("attention_bias is not supported yet")
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.refusal(f"hidden_act must be silu, got {fields.get('hidden_act')!r}")


def _block_size(fields: JsonFields) -> int:
    return fields.integer("block_size", at_least=2)  # the root and one masked slot


def _mask_token_id(fields: JsonFields) -> int:
    token, vocab_size = fields.get("mask_token_id"), fields.integer("vocab_size")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise fields.error(
            f"dflash_config.mask_token_id must be a token id below {vocab_size}, got {token!r}"
        )
    return token


def _target_layer_ids(
    fields: JsonFields, num_layers: int, num_target_layers: int
) -> tuple[int, ...]:
    ids = fields.get("target_layer_ids")
    if ids is None:
        return default_target_layer_ids(num_target_layers, num_layers)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise fields.error(f"target_layer_ids must be a list of layer numbers, got {ids!r}")
    if not all(0 <= i < num_target_layers for i in ids):
        raise fields.error(
            f"target_layer_ids {ids} must lie in 0 .. {num_target_layers - 1} "
            "(num_target_layers - 1)"
        )
    return tuple(ids)


def _visibility(fields: JsonFields, num_layers: int) -> tuple[DraftVisibility, ...]:
    types = fields.get("layer_types", ["full_attention"] * num_layers)
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error(f"layer_types must have one entry for each of the {num_layers} layers")
    return tuple(_layer_visibility(fields, layer_type) for layer_type in types)


def _layer_visibility(fields: JsonFields, layer_type: str) -> DraftVisibility:
    """Sliding layers are causal inside the block unless is_causal says otherwise, full ones not."""
    if layer_type not in ("full_attention", "sliding_attention"):
        raise fields.refusal(f"layer type {layer_type!r} is not supported yet")
    sliding = layer_type == "sliding_attention"
    causal = bool(fields.get("is_causal", sliding))
    if not sliding or fields.get("use_sliding_window") is False:
        return DraftVisibility(causal=causal, window=None)
    return DraftVisibility(causal=causal, window=fields.integer("sliding_window"))


def _rope(fields: JsonFields) -> tuple[float, Yarn | None]:
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
        raise fields.refusal("rope parameters that differ by layer are not supported yet")
    theta = scaling.get("rope_theta", fields.get("rope_theta"))
    if not isinstance(theta, int | float):
        raise fields.error("rope_theta is missing")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise fields.refusal("partial_rotary_factor is not supported: the whole head is rotated")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "yarn":
        raise fields.refusal(f"rope type {kind!r} is not supported; default and yarn are")
    return float(theta), _yarn(fields, scaling)


def _yarn(fields: JsonFields, scaling: Mapping[str, Any]) -> Yarn:
    for name in ("factor", "original_max_position_embeddings"):
        if not isinstance(scaling.get(name), int | float):
            raise fields.error(f"yarn rope needs {name}")
    if scaling.get("truncate") is False:
        raise fields.refusal("yarn with truncate false is not supported")
    return Yarn(
        factor=float(scaling["factor"]),
        original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        attention_factor=scaling.get("attention_factor"),
    )
