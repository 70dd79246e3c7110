"""This rank's part of every weight, read from a checkpoint and fused as the layers want it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kdray.kernels.ops import Ops
from kdray.model.checkpoint import Checkpoint
from kdray.model.config import ModelConfig
from kdray.model.int4 import read_linear
from kdray.model.layers import RmsNorm, laid_out
from kdray.model.mla import LatentAttention
from kdray.model.moe import DenseMLP, MoE, PackedMoE, Router
from kdray.model.packed_experts import are_packed, read_experts
from kdray.model.parallel import Shard
from kdray.model.placed import threads_at
from kdray.model.rope import softmax_scale

MOST_THREADS = 8
LAYERS_AT_A_TIME = 3  # one is packed while the next ones are read
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightReader:
    """Reads layer by layer; everything comes out in `dtype` on `device`, router facts in fp32
    (its weight: see _router).

    threads   above 1: some layers are read at the same time
    """

    checkpoint: Checkpoint
    config: ModelConfig
    shard: Shard
    dtype: torch.dtype
    device: torch.device
    threads: int = 1

    def each_layer(self, read: Callable[[int], T]) -> tuple[T, ...]:
        """read(0), read(1), .. by several threads; the first error ends them all."""
        layers = range(self.config.num_hidden_layers)
        if self.threads == 1:
            return tuple(read(layer) for layer in layers)
        most = min(self.threads, LAYERS_AT_A_TIME)
        with threads_at(self.device, most, "kdray-load") as pool:
            try:
                return tuple(pool.map(read, layers))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def plain(self, name: str, rows: slice | None = None) -> Tensor:
        return self._placed(self.checkpoint.tensor(f"{name}.weight", rows))

    def vocab_rows(self, name: str) -> Tensor:
        """[vocab / ranks, E]: this rank's rows of the embedding or the head."""
        return self.plain(name, self.shard.slice_of(self.config.vocab_size))

    def norm(self, name: str, eps: float) -> RmsNorm:
        return RmsNorm.of(self.plain(name), eps)

    def attention(self, layer: int, ops: Ops, norm_eps: float) -> LatentAttention:
        config, root = self.config, f"model.layers.{layer}.self_attn"
        heads = self.shard.slice_of(config.num_attention_heads)
        queries = _rows_of(heads, config.qk_head_dim)
        has_latent = config.q_lora_rank is not None
        first = (
            self._rows(f"{root}.q_a_proj")
            if has_latent
            else self._rows(f"{root}.q_proj", rows=queries)
        )
        expanded = config.qk_nope_head_dim + config.v_head_dim
        kv_up = self._rows(f"{root}.kv_b_proj", rows=_rows_of(heads, expanded))
        key_up, value_up = torch.unflatten(kv_up, 0, (-1, expanded)).split_with_sizes(
            [config.qk_nope_head_dim, config.v_head_dim], dim=1
        )
        return LatentAttention(
            ops=ops,
            down=laid_out(torch.cat([first, self._rows(f"{root}.kv_a_proj_with_mqa")])),
            query_norm=self.norm(f"{root}.q_a_layernorm", norm_eps) if has_latent else None,
            query_up=self._linear(f"{root}.q_b_proj", rows=queries) if has_latent else None,
            latent_norm=self.norm(f"{root}.kv_a_layernorm", norm_eps),
            key_up=laid_out(key_up.mT),
            value_up=laid_out(value_up),
            output=self._linear(f"{root}.o_proj", cols=_rows_of(heads, config.v_head_dim)),
            scale=softmax_scale(config),
        )

    def mlp(self, layer: int, ops: Ops) -> DenseMLP | MoE | PackedMoE:
        root = f"model.layers.{layer}.mlp"
        if self.config.is_moe(layer):
            return self._moe(root, ops)
        return DenseMLP(ops, *self._dense(root, self.config.intermediate_size))

    def _moe(self, root: str, ops: Ops) -> MoE | PackedMoE:
        config = self.config
        weight = self.checkpoint.tensor(f"{root}.gate.weight").to(self.device)
        bias = self.checkpoint.tensor(f"{root}.gate.e_score_correction_bias").to(self.device)
        router = Router.of(config, self._router(weight), bias, ops)
        inner = config.moe_intermediate_size * config.n_shared_experts
        shared = DenseMLP(ops, *self._dense(f"{root}.shared_experts", inner))
        stay_packed = experts_stay_packed(config, self.dtype, self.device)
        if stay_packed and are_packed(self.checkpoint, config, root):
            experts = read_experts(self.checkpoint, config, self.shard, root, self.device)
            return PackedMoE(ops, router, experts, shared)
        return MoE(ops, router, *self._experts(f"{root}.experts"), shared)

    def _experts(self, root: str) -> tuple[Tensor, Tensor]:
        """gate_up and down of all experts."""
        config, inter = self.config, self.config.moe_intermediate_size
        shape = (config.n_routed_experts, config.hidden_size, 2 * inter // self.shard.size)
        # Filled in place: a list of all experts and their stack would need the memory twice.
        gate_up = torch.empty(shape, dtype=self.dtype, device=self.device)
        down = torch.empty(
            (shape[0], shape[2] // 2, shape[1]), dtype=self.dtype, device=self.device
        )
        for x in range(config.n_routed_experts):
            gate_up[x], down[x] = self._dense(f"{root}.{x}", inter)
        return gate_up, down

    def _dense(self, root: str, intermediate: int) -> tuple[Tensor, Tensor]:
        """gate_up and down of a SwiGLU."""
        part = self.shard.slice_of(intermediate)
        gate, up = (self._rows(f"{root}.{name}_proj", rows=part) for name in ("gate", "up"))
        gate_up = laid_out(torch.cat([gate, up]))
        return gate_up, self._linear(f"{root}.down_proj", cols=part)

    def _router(self, weight: Tensor) -> Tensor:
        """[E, n_experts]. On a GPU a bf16 weight stays one for rows of bf16, which loses nothing
        and halves what is read; on a CPU fp32 saves a conversion at every call."""
        if self.dtype == weight.dtype == torch.bfloat16 and weight.is_cuda:
            return laid_out(weight)
        return laid_out(weight.float())

    def _linear(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """[in, out] of some inputs (cols) and outputs (rows)."""
        return laid_out(self._rows(name, rows, cols))

    def _rows(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """[out, in]: some outputs (rows) and inputs (cols), as the checkpoint has them."""
        return self._placed(read_linear(self.checkpoint, name, rows, cols))

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)


def _rows_of(heads: slice, width: int) -> slice:
    """The rows (or columns) that a run of heads of `width` numbers each takes."""
    return slice(heads.start * width, heads.stop * width)


def load_threads(device: torch.device) -> int:
    """Threads that read: a disk and a PCIe link want several; on a CPU torch has its own."""
    return min(MOST_THREADS, os.cpu_count() or 1) if device.type == "cuda" else 1


def experts_stay_packed(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether routed experts are held as INT4, as they are stored; else they become `dtype`."""
    return config.quantization == "int4" and device.type == "cuda" and dtype == torch.bfloat16
