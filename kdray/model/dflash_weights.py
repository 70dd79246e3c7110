"""A DFlash drafter's tensors, checked by name and shape before any memory is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kdray.config import LoadFormat
from kdray.errors import CheckpointError, UnsupportedModel
from kdray.kernels.moe_layout import PackedExperts
from kdray.model.checkpoint import Checkpoint
from kdray.model.dflash import DraftLayer, DraftMLP, DraftWeights, WholeDraftMLP
from kdray.model.dflash_config import DFlashConfig
from kdray.model.draft_int4 import (
    EveryPart,
    MlpForm,
    PackedDraftMLP,
    check_groups,
    int4_of,
    part_of,
    rounded,
)
from kdray.model.dummy_weights import Described
from kdray.model.layers import RmsNorm, laid_out
from kdray.model.parallel import Shard
from kdray.model.weight_source import weight_source

# Names of the native export that differ from z-lab's.
_ALIASES = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}


def load_weights(
    folder: str | Path,
    config: DFlashConfig,
    dtype: torch.dtype,
    device: torch.device,
    form: MlpForm = "whole",
    load_format: LoadFormat = "auto",
    shard: Shard = Shard(),  # noqa: B008 (frozen)
) -> DraftWeights:
    """A rank's part of the folder in `dtype`, q, k and v and the two halves of the MLP joined.

    config: the whole drafter's; form: of the MLPs. Raises ConfigError where INT4 cannot hold their
    sizes.
    """
    if form != "whole":
        check_groups(config.of_rank(shard.size))
    source = weight_source(load_format)
    shapes = dict(weight_shapes(config))
    opened = source.open(folder, (Described(name, "BF16", shapes[name]) for name in shapes))
    with closing(source.place(opened, device)) as checkpoint:
        reader = _Reader(checkpoint, dtype, device, config.rms_norm_eps, shard)
        reader.check(shapes)
        own = config.of_rank(shard.size)
        read_mlp = _mlp_reader(reader, own, form)
        weights = DraftWeights(
            fc=reader.laid_out(reader.inputs("fc.weight")),
            hidden_norm=reader.norm("hidden_norm.weight"),
            layers=tuple(_layer(reader, i, own, read_mlp) for i in range(len(config.layers))),
            norm=reader.norm("norm.weight"),
        )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what laying out took is for those behind, torch or not
    return weights


@dataclass(frozen=True)
class _Reader:
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    eps: float
    shard: Shard

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Every wanted tensor is there with its shape, and no tensor is left unread."""
        for name, shape in shapes.items():
            self.checkpoint.require(self._stored_name(name), shape)
        unread = sorted(set(self.checkpoint.names) - {self._stored_name(name) for name in shapes})
        if unread:
            raise UnsupportedModel(
                f"{self.checkpoint.folder} holds {unread[0]} ({len(unread)} such tensors), which "
                "no plain DFlash drafter has; drafters with further parts are not supported yet"
            )

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm.of(self.vector(name), self.eps)

    def vector(self, name: str) -> Tensor:
        return self.checkpoint.tensor(self._stored_name(name)).to(self.device, self.dtype)

    def laid_out(self, weight: Tensor) -> Tensor:
        """[out, in] as it is stored -> [in, out]."""
        return laid_out(weight.to(self.device, self.dtype))

    def outputs(self, name: str, part: slice | None = None) -> Tensor:
        """This rank's outputs of a matrix, or a part of them: [out / ranks, in] as in the file."""
        name = self._stored_name(name)
        total = self.checkpoint.tensors[name].shape[0]
        return self.checkpoint.tensor(name, _within(self.shard.slice_of(total), part))

    def inputs(self, name: str) -> Tensor:
        """Of a matrix what this rank's inputs meet: [out, in / ranks]."""
        name = self._stored_name(name)
        total = self.checkpoint.tensors[name].shape[1]
        own = self.shard.slice_of(total) if self.shard.size > 1 else None
        return self.checkpoint.tensor(name, None, own)

    def _stored_name(self, name: str) -> str:
        spellings = [name, f"model.{name}"]
        if name in _ALIASES:
            spellings += [_ALIASES[name], f"model.{_ALIASES[name]}"]
        for spelling in spellings:
            if spelling in self.checkpoint:
                return spelling
        raise CheckpointError(
            f"tensor {name} is missing in {self.checkpoint.folder}: it is no DFlash drafter, "
            "or not all of one"
        )


def _within(own: slice, part: slice | None) -> slice:
    """A part of a part, by where it lies in the whole."""
    return own if part is None else slice(own.start + part.start, own.start + part.stop)


ReadMLP = Callable[[str], DraftMLP]


def _layer(reader: _Reader, index: int, config: DFlashConfig, read_mlp: ReadMLP) -> DraftLayer:
    prefix = f"layers.{index}."
    attention = prefix + "self_attn."
    q_norm, k_norm = (reader.vector(f"{attention}{x}_norm.weight") for x in "qk")
    query_norms, key_norms = [q_norm] * config.num_heads, [k_norm] * config.num_kv_heads
    return DraftLayer(
        input_norm=reader.norm(f"{prefix}input_layernorm.weight"),
        qkv=reader.laid_out(
            torch.cat([reader.outputs(f"{attention}{x}_proj.weight") for x in "qkv"])
        ),
        head_norm=RmsNorm.of(torch.stack(query_norms + key_norms), reader.eps),
        key_norm=RmsNorm.of(torch.stack(key_norms), reader.eps),
        out=reader.laid_out(reader.inputs(f"{attention}o_proj.weight")),
        post_norm=reader.norm(f"{prefix}post_attention_layernorm.weight"),
        mlp=read_mlp(f"{prefix}mlp."),
    )


def _mlp_reader(reader: _Reader, config: DFlashConfig, form: MlpForm) -> ReadMLP:
    """Reads an MLP by the prefix of its tensors' names."""
    if form == "packed":
        part = part_of(config.intermediate_size)
        every = EveryPart.of(config.intermediate_size // part, reader.device)
        return lambda prefix: _packed_mlp(reader, prefix, config, part, every)
    change = rounded if form == "rounded" else _as_it_is

    def read(prefix: str) -> DraftMLP:
        gate, up = (
            change(reader.outputs(f"{prefix}{name}_proj.weight")) for name in ("gate", "up")
        )
        down = change(reader.inputs(f"{prefix}down_proj.weight"))
        return WholeDraftMLP(reader.laid_out(torch.cat([gate, up])), reader.laid_out(down))

    return read


def _packed_mlp(
    reader: _Reader, prefix: str, config: DFlashConfig, part: int, every: EveryPart
) -> PackedDraftMLP:
    """Part by part, which bounds what lies about while they are rounded and packed."""
    width, inner = config.hidden_size, config.intermediate_size
    experts = PackedExperts.empty(inner // part, width, part, reader.device)
    down = reader.inputs(f"{prefix}down_proj.weight")
    for number in range(experts.num_experts):
        own = slice(number * part, (number + 1) * part)
        gate, up = (reader.outputs(f"{prefix}{name}_proj.weight", own) for name in ("gate", "up"))
        experts.put(number, int4_of(gate), int4_of(up), int4_of(down[:, own]))
    return PackedDraftMLP(experts, every)


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


def weight_shapes(config: DFlashConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of the whole drafter, or a rank's part of it."""
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * dim, config.num_kv_heads * dim
    yield "fc.weight", (width, config.feature_size // config.ranks)
    yield "hidden_norm.weight", (width,)
    yield "norm.weight", (width,)
    for index in range(len(config.layers)):
        attention = f"layers.{index}.self_attn."
        yield f"{attention}q_proj.weight", (query, width)
        yield f"{attention}k_proj.weight", (key, width)
        yield f"{attention}v_proj.weight", (key, width)
        yield f"{attention}o_proj.weight", (width, query)
        yield f"{attention}q_norm.weight", (dim,)
        yield f"{attention}k_norm.weight", (dim,)
        yield f"layers.{index}.input_layernorm.weight", (width,)
        yield f"layers.{index}.post_attention_layernorm.weight", (width,)
        yield f"layers.{index}.mlp.gate_proj.weight", (inner, width)
        yield f"layers.{index}.mlp.up_proj.weight", (inner, width)
        yield f"layers.{index}.mlp.down_proj.weight", (width, inner)
