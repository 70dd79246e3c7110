"""A DFlash drafter's tensors, checked by name and shape before any memory is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kdray.errors import CheckpointError, UnsupportedModel
from kdray.model.checkpoint import Checkpoint
from kdray.model.dflash import DraftLayer, DraftWeights
from kdray.model.dflash_config import DFlashConfig
from kdray.model.layers import RmsNorm
from kdray.model.placed import PlacedCheckpoint

# Names of the native export that differ from z-lab's.
_ALIASES = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}


def load_weights(
    folder: str | Path, config: DFlashConfig, dtype: torch.dtype, device: torch.device
) -> DraftWeights:
    """Every tensor of the folder in `dtype`, q, k and v and the two halves of the MLP joined."""
    checkpoint = PlacedCheckpoint(Checkpoint.open(folder), device)
    reader = _Reader(checkpoint, dtype, device, config.rms_norm_eps)
    shapes = dict(weight_shapes(config))
    reader.check(shapes)
    return DraftWeights(
        fc=reader.matrix("fc.weight"),
        hidden_norm=reader.norm("hidden_norm.weight"),
        layers=tuple(_layer(reader, i, config) for i in range(len(config.layers))),
        norm=reader.norm("norm.weight"),
    )


@dataclass(frozen=True)
class _Reader:
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    eps: float

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
        stored = self.checkpoint.tensor(self._stored_name(name))
        return stored.to(self.device, self.dtype)

    def matrix(self, *names: str) -> Tensor:
        """Weights [in, out] side by side: the transpose of how they are stored."""
        parts = [self.checkpoint.tensor(self._stored_name(name)) for name in names]
        return torch.cat(parts).to(self.device, self.dtype).T.contiguous()

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


def _layer(reader: _Reader, index: int, config: DFlashConfig) -> DraftLayer:
    prefix = f"layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    q_norm, k_norm = (reader.vector(f"{attention}{x}_norm.weight") for x in "qk")
    query_norms, key_norms = [q_norm] * config.num_heads, [k_norm] * config.num_kv_heads
    return DraftLayer(
        input_norm=reader.norm(f"{prefix}input_layernorm.weight"),
        qkv=reader.matrix(*(f"{attention}{x}_proj.weight" for x in "qkv")),
        head_norm=RmsNorm.of(torch.stack(query_norms + key_norms), reader.eps),
        key_norm=RmsNorm.of(torch.stack(key_norms), reader.eps),
        out=reader.matrix(f"{attention}o_proj.weight"),
        post_norm=reader.norm(f"{prefix}post_attention_layernorm.weight"),
        gate_up=reader.matrix(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
        down=reader.matrix(f"{mlp}down_proj.weight"),
    )


def weight_shapes(config: DFlashConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * dim, config.num_kv_heads * dim
    yield "fc.weight", (width, len(config.target_layer_ids) * width)
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
