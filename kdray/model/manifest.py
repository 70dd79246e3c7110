"""Every tensor a model needs, and the check that a folder holds them, before memory is taken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kdray.errors import CheckpointError, ConfigError, UnsupportedModel
from kdray.model.checkpoint import Checkpoint
from kdray.model.config import INT4_GROUP, ModelConfig
from kdray.model.int4 import PER_WORD
from kdray.model.parallel import Shard
from kdray.model.stored import StoredTensor

SHAPE_THREADS, SHAPES_A_THREAD = 16, 500
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Needed(NamedTuple):
    """A tensor by name and shape; linears may be stored packed, and have no `.weight` here.

    splits_inputs    the ranks divide this linear's inputs
    splits_outputs   they divide its rows; neither: every rank holds it whole
    """

    name: str
    shape: tuple[int, ...]
    is_linear: bool = False
    splits_inputs: bool = False
    splits_outputs: bool = False

    @property
    def is_expert(self) -> bool:
        """A routed expert's: the part of a model that is stored packed."""
        return ".mlp.experts." in self.name


def needed_tensors(config: ModelConfig) -> Iterator[Needed]:
    """All tensors of the language model; shapes are (outputs, inputs)."""
    width, vocab = config.hidden_size, config.vocab_size
    yield Needed("model.embed_tokens.weight", (vocab, width), splits_outputs=True)
    yield Needed("model.norm.weight", (width,))
    yield Needed("lm_head.weight", (vocab, width), splits_outputs=True)
    for layer in range(config.num_hidden_layers):
        root = f"model.layers.{layer}"
        yield Needed(f"{root}.input_layernorm.weight", (width,))
        yield Needed(f"{root}.post_attention_layernorm.weight", (width,))
        yield from _attention(config, f"{root}.self_attn")
        if config.is_moe(layer):
            yield from _moe(config, f"{root}.mlp")
        else:
            yield from _mlp(f"{root}.mlp", width, config.intermediate_size)


def _attention(config: ModelConfig, root: str) -> Iterator[Needed]:
    width, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * config.qk_head_dim
    if config.q_lora_rank is None:
        yield Needed(f"{root}.q_proj", (queries, width), is_linear=True, splits_outputs=True)
    else:
        yield Needed(f"{root}.q_a_proj", (config.q_lora_rank, width), is_linear=True)
        yield Needed(f"{root}.q_a_layernorm.weight", (config.q_lora_rank,))
        yield Needed(
            f"{root}.q_b_proj", (queries, config.q_lora_rank), is_linear=True, splits_outputs=True
        )
    yield Needed(f"{root}.kv_a_proj_with_mqa", (config.kv_width, width), is_linear=True)
    yield Needed(f"{root}.kv_a_layernorm.weight", (latent,))
    expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield Needed(f"{root}.kv_b_proj", (expanded, latent), is_linear=True, splits_outputs=True)
    yield Needed(
        f"{root}.o_proj", (width, heads * config.v_head_dim), is_linear=True, splits_inputs=True
    )


def _moe(config: ModelConfig, root: str) -> Iterator[Needed]:
    width, inter = config.hidden_size, config.moe_intermediate_size
    yield Needed(f"{root}.gate.weight", (config.n_routed_experts, width))
    yield Needed(f"{root}.gate.e_score_correction_bias", (config.n_routed_experts,))
    for expert in range(config.n_routed_experts):
        yield from _mlp(f"{root}.experts.{expert}", width, inter)
    yield from _mlp(f"{root}.shared_experts", width, inter * config.n_shared_experts)


def _mlp(root: str, width: int, inter: int) -> Iterator[Needed]:
    yield Needed(f"{root}.gate_proj", (inter, width), is_linear=True, splits_outputs=True)
    yield Needed(f"{root}.up_proj", (inter, width), is_linear=True, splits_outputs=True)
    yield Needed(f"{root}.down_proj", (width, inter), is_linear=True, splits_inputs=True)


def check_shard(config: ModelConfig, shard: Shard) -> None:
    """ConfigError where the ranks cannot split the model evenly."""
    if not 0 <= shard.rank < shard.size:
        raise ConfigError(f"rank {shard.rank} is not one of {shard.size} ranks")
    split = {
        "num_attention_heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
    }
    uneven = [f"{name} {total}" for name, total in split.items() if total % shard.size]
    if uneven:
        raise ConfigError(f"tp {shard.size} must divide {', '.join(uneven)}; choose another tp")


def check_checkpoint(checkpoint: Checkpoint, config: ModelConfig, shard: Shard) -> None:
    """Every needed tensor is there with its shape and dtype, splits evenly, and nothing else is."""
    known: set[str] = set()
    for needed in needed_tensors(config):
        known.update(_check_one(checkpoint, config, shard, needed))
    for name in checkpoint.names:
        if name not in known and not _is_spare(name, config):
            raise _unknown(checkpoint, name)
    _check_told_shapes(checkpoint, config)


def _check_told_shapes(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Packed linears bring a tensor of their shape: 69,120 reads of 8 bytes for Kimi K2.6, all over
    the files, of which a disk does several at a time."""
    told = [
        (f"{needed.name}.weight_shape", needed.shape)
        for needed in needed_tensors(config)
        if needed.is_linear and f"{needed.name}.weight_shape" in checkpoint
    ]
    threads = min(SHAPE_THREADS, 1 + len(told) // SHAPES_A_THREAD)
    with ThreadPoolExecutor(threads, "kdray-shapes") as pool:
        read = pool.map(lambda one: checkpoint.tensor(one[0]).tolist(), told)
        for (name, wanted), found in zip(told, read, strict=True):
            if found != list(wanted):
                pool.shutdown(wait=False, cancel_futures=True)
                raise CheckpointError(
                    f"{name} says {found} where {list(wanted)} is wanted "
                    f"({checkpoint.find(name).path})"
                )


def bytes_to_read(
    checkpoint: Checkpoint, config: ModelConfig, shard: Shard, *, whole_rows: bool = True
) -> int:
    """Bytes that a rank reads: its rows, whole where it takes columns of them; else those alone."""
    total = 0
    for needed in needed_tensors(config):
        is_split = needed.splits_outputs or (needed.splits_inputs and not whole_rows)
        share = shard.size if is_split else 1
        for name in _stored_names(checkpoint, needed):
            stored = checkpoint.find(name)
            total += (stored.end - stored.start) // share
    return total


def _stored_names(checkpoint: Checkpoint, needed: Needed) -> tuple[str, ...]:
    """Where the numbers of a tensor are: by one name, or by two where it is packed."""
    if not needed.is_linear:
        return (needed.name,)
    if f"{needed.name}.weight_packed" in checkpoint:
        return f"{needed.name}.weight_packed", f"{needed.name}.weight_scale"
    return (f"{needed.name}.weight",)


def _check_one(
    checkpoint: Checkpoint, config: ModelConfig, shard: Shard, needed: Needed
) -> tuple[str, ...]:
    """Check one tensor and return the stored names it accounts for."""
    name = needed.name
    if not needed.is_linear:
        checkpoint.require(name, needed.shape)
        return (name,)
    packed, scale, shape = (f"{name}.weight_{part}" for part in ("packed", "scale", "shape"))
    if config.quantization != "int4" or packed not in checkpoint:
        checkpoint.require(f"{name}.weight", needed.shape)
        return (f"{name}.weight",)
    _check_groups(needed, shard, checkpoint.find(packed))
    outputs, inputs = needed.shape
    checkpoint.require(packed, (outputs, inputs // PER_WORD), ("I32",))
    checkpoint.require(scale, (outputs, inputs // INT4_GROUP))
    if shape in checkpoint:
        checkpoint.require(shape, (2,), ("I32", "I64"))
    return packed, scale, shape


def _check_groups(needed: Needed, shard: Shard, stored: StoredTensor) -> None:
    """A packed linear's inputs, and each rank's part of them, must be whole INT4 groups."""
    name, inputs = needed.name, needed.shape[1]
    if inputs % INT4_GROUP:
        raise CheckpointError(
            f"{name} has {inputs} inputs; packed INT4 needs a multiple of {INT4_GROUP} "
            f"({stored.path})"
        )
    if needed.splits_inputs and inputs % (INT4_GROUP * shard.size):
        raise ConfigError(
            f"tp {shard.size} leaves {inputs // shard.size} of the {inputs} inputs of {name} to a "
            f"rank; packed INT4 needs a multiple of {INT4_GROUP}: choose a smaller tp "
            f"({stored.path})"
        )


def _is_spare(name: str, config: ModelConfig) -> bool:
    """Tensors a published file may hold that nobody reads: prediction layers, rope tables."""
    layer, predicting = _LAYER.match(name), config.num_nextn_predict_layers
    if layer is not None and int(layer[1]) >= config.num_hidden_layers:
        return predicting is None or int(layer[1]) < config.num_hidden_layers + predicting
    return name.endswith(".rotary_emb.inv_freq")


def _unknown(checkpoint: Checkpoint, name: str) -> CheckpointError:
    path = checkpoint.find(name).path
    if not name.startswith(("model.", "lm_head.")):
        return CheckpointError(
            f"tensor {name} has an unknown prefix ({path}); kdray reads model.* and lm_head.*, "
            "with or without language_model. before them"
        )
    return UnsupportedModel(
        f"tensor {name} is not part of the architecture config.json describes ({path})"
    )
