"""The target model: one rank's shard of a DeepSeek-V3-family network."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kdray.config import LoadFormat
from kdray.errors import ConfigError
from kdray.kernels.ops import Ops
from kdray.model.batch import ForwardBatch, TargetOutput
from kdray.model.config import ModelConfig
from kdray.model.dummy_weights import target_tensors
from kdray.model.layers import RmsNorm
from kdray.model.manifest import bytes_to_read, check_checkpoint, check_shard
from kdray.model.mla import AttentionSplit, LatentAttention, Rows
from kdray.model.moe import DenseMLP, MoE, PackedMoE
from kdray.model.parallel import Collectives, Shard, SoloCollectives
from kdray.model.placed import with_index
from kdray.model.progress import LoadProgress
from kdray.model.rope import Rope
from kdray.model.weight_source import weight_source
from kdray.model.weights import WeightReader, load_threads

# The epsilon of the q_a and kv_a norms is not in config.json: the family's own code uses this one.
NORM_EPS_QKV = 1e-6


@dataclass(frozen=True, eq=False)
class Layer:
    """One block: x + attention(norm(x)), then + mlp(norm(..))."""

    attention_norm: RmsNorm
    attention: LatentAttention
    mlp_norm: RmsNorm
    mlp: DenseMLP | MoE | PackedMoE


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetModel:
    """Runs the rows of a step; every rank calls the same methods in the same order.

    embedding, head   [V / ranks, E]: this rank's rows of the vocabulary
    taps              0-based layers whose outputs become the features, side by side in this order
    """

    config: ModelConfig
    ops: Ops
    shard: Shard
    collectives: Collectives
    embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: RmsNorm
    head: Tensor
    rope: Rope
    taps: tuple[int, ...]

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        ops: Ops,
        shard: Shard = Shard(),  # noqa: B008 (frozen)
        collectives: Collectives | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        norm_eps_qkv: float | None = None,
        taps: Sequence[int] = (),
        threads: int | None = None,
        load_format: LoadFormat = "auto",
    ) -> TargetModel:
        """Read this rank's part of a model folder, by several threads for a GPU.

        The folder and the split are checked whole before any weight is read: CheckpointError,
        UnsupportedModel or ConfigError say what is wrong.
        """
        config = ModelConfig.from_folder(folder)
        check_shard(config, shard)
        _check_taps(config, taps)
        source = weight_source(load_format)
        checkpoint = source.open(folder, target_tensors(config))
        check_checkpoint(checkpoint, config, shard)
        device = with_index(torch.device(device))
        eps = NORM_EPS_QKV if norm_eps_qkv is None else norm_eps_qkv
        threads = threads or load_threads(device)
        total = bytes_to_read(checkpoint, config, shard, whole_rows=source.has_whole_rows)
        with (
            LoadProgress(total, f"{source.what} of rank {shard.rank}") as progress,
            closing(source.place(checkpoint, device, progress.add, threads)) as placed,
        ):
            reader = WeightReader(
                checkpoint=placed,
                config=config,
                shard=shard,
                dtype=dtype,
                device=device,
                threads=threads,
            )
            model = cls.read(
                reader, ops=ops, collectives=collectives, norm_eps_qkv=eps, taps=tuple(taps)
            )
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what packing took is for pages
        return model

    @classmethod
    def read(
        cls,
        reader: WeightReader,
        *,
        ops: Ops,
        collectives: Collectives | None = None,
        norm_eps_qkv: float = NORM_EPS_QKV,
        taps: tuple[int, ...] = (),
    ) -> TargetModel:
        """The model of a checkpoint that has been checked."""
        config = reader.config
        return cls(
            config=config,
            ops=ops,
            shard=reader.shard,
            collectives=SoloCollectives() if collectives is None else collectives,
            embedding=reader.vocab_rows("model.embed_tokens"),
            layers=reader.each_layer(lambda layer: _read_layer(reader, layer, ops, norm_eps_qkv)),
            final_norm=reader.norm("model.norm", config.rms_norm_eps),
            head=reader.vocab_rows("lm_head"),
            rope=Rope.of(config, reader.device),
            taps=tuple(taps),
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_width(self) -> int:
        """Numbers a token leaves in each layer's cache."""
        return self.config.kv_width

    def forward(self, batch: ForwardBatch, caches: Sequence[Tensor]) -> TargetOutput:
        """Run T rows; their KV is written to caches (one [S, C + D] a layer) at batch.slot."""
        reduce_norm = self.collectives.all_reduce_norm
        rows = Rows(
            turns=self.rope.turns(batch.position),
            slot=batch.slot,
            split=self._split(batch),
        )
        x = self.embed(batch.token)
        normed = self.ops.rms_norm(x, self.layers[0].attention_norm)
        outputs: dict[int, Tensor] = {}
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            attended = layer.attention.partial(normed, rows, cache)
            x, normed = reduce_norm(attended, x, layer.mlp_norm, self.ops)
            mixed = layer.mlp.partial(normed, batch.live)
            x, normed = reduce_norm(mixed, x, self._norm_after(i), self.ops)
            if i in self.taps:
                outputs[i] = x
        features = [outputs[i] for i in self.taps] or [x[:, :0]]
        return TargetOutput(hidden=normed, features=torch.cat(features, dim=-1))

    def _split(self, batch: ForwardBatch) -> AttentionSplit:
        """A row that is expanded has other bits than one that is not."""
        if self.ops.batch_invariant:
            return AttentionSplit(batch.attention, None, ())
        return AttentionSplit.of(batch.attention)

    def _norm_after(self, layer: int) -> RmsNorm:
        """What reads a layer's output: the next layer, or the head."""
        is_last = layer + 1 == len(self.layers)
        return self.final_norm if is_last else self.layers[layer + 1].attention_norm

    def embed(self, token: Tensor) -> Tensor:
        """token [T] integers -> [T, E]."""
        if self.shard.size == 1:
            return F.embedding(token, self.embedding)
        local = token - self.shard.rank * self.embedding.shape[0]
        is_mine = (local >= 0) & (local < self.embedding.shape[0])
        found = F.embedding(local.where(is_mine, 0), self.embedding)
        return self.collectives.all_reduce(found * is_mine[:, None])

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, E] -> [M, V] fp32 over the whole vocabulary, on every rank."""
        return self.collectives.all_gather(self.own_logits(hidden))

    def dealt_logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, E] -> [S, V] fp32: the rows that this rank draws, rank * S on.

        S = ceil(M / ranks); rows beyond M mean nothing.
        """
        missing = -len(hidden) % self.shard.size
        padded = F.pad(hidden, (0, 0, 0, missing)) if missing else hidden
        return self.collectives.deal_rows(self.own_logits(padded))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, E] -> [M, V / ranks] fp32: rounded to bf16, near-ties would be ties."""
        return self.ops.linear(hidden, self.head.T, dtype=torch.float32)


def _check_taps(config: ModelConfig, taps: Sequence[int]) -> None:
    outside = [tap for tap in taps if not 0 <= tap < config.num_hidden_layers]
    if outside:
        raise ConfigError(
            f"taps {outside} are not layers of the target, which has {config.num_hidden_layers}"
        )


def _read_layer(reader: WeightReader, layer: int, ops: Ops, norm_eps_qkv: float) -> Layer:
    root, eps = f"model.layers.{layer}", reader.config.rms_norm_eps
    return Layer(
        attention_norm=reader.norm(f"{root}.input_layernorm", eps),
        attention=reader.attention(layer, ops, norm_eps_qkv),
        mlp_norm=reader.norm(f"{root}.post_attention_layernorm", eps),
        mlp=reader.mlp(layer, ops),
    )
