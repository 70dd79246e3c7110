"""What a drafter borrows of the target, its embedding and its head: whole, or each rank's part."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kdray.config import LoadFormat
from kdray.errors import ConfigError
from kdray.kernels.ops import Ops, PartialTopk
from kdray.model.config import ModelConfig
from kdray.model.dummy_weights import target_tensors
from kdray.model.target import TargetModel
from kdray.model.weight_source import weight_source


class Vocabulary(Protocol):
    """Between token ids and a drafter's rows."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def embed(self, token: Tensor) -> Tensor:
        """token [..] integers -> [.., E]."""
        ...

    def best(self, hidden: Tensor, k: int, ops: Ops) -> tuple[Tensor, Tensor]:
        """hidden [R, L, E] -> the k best tokens and their scores, [R, L, k] (Ops.topk_logprob)."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetTables(Vocabulary):
    """embedding, head   [V, E], every row of the vocabulary"""

    embedding: Tensor
    head: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def device(self) -> torch.device:
        return self.head.device

    def embed(self, token: Tensor) -> Tensor:
        return F.embedding(token, self.embedding)

    def best(self, hidden: Tensor, k: int, ops: Ops) -> tuple[Tensor, Tensor]:
        return ops.topk_logprob(F.linear(hidden, self.head), k)

    @classmethod
    def shared(cls, target: TargetModel) -> TargetTables:
        """The very tensors of a target that is not split over ranks."""
        if target.shard.size != 1:
            raise ConfigError(
                f"the target is split over {target.shard.size} ranks and holds a part of its "
                "tables; give the drafter the target's folder"
            )
        return cls(embedding=target.embedding, head=target.head)

    @classmethod
    def read(
        cls,
        folder: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        load_format: LoadFormat = "auto",
    ) -> TargetTables:
        """Copies of both tables from the target's folder."""
        config = ModelConfig.from_folder(folder)
        source = weight_source(load_format)
        shape = (config.vocab_size, config.hidden_size)
        tables = []
        opened = source.open(folder, target_tensors(config))
        with closing(source.place(opened, device)) as checkpoint:
            for name in ("model.embed_tokens.weight", "lm_head.weight"):
                checkpoint.require(name, shape)
                tables.append(checkpoint.tensor(name).to(device, dtype))
        return cls(embedding=tables[0], head=tables[1])


@dataclass(frozen=True, eq=False)
class SplitTables(Vocabulary):
    """The tables of a target that ranks share; all of them call alike.

    Every rank finds the best of its part of the vocabulary, and few numbers travel: those, and what
    a rank's part weighs among all. Every rank merges them.
    """

    target: TargetModel

    @property
    def dtype(self) -> torch.dtype:
        return self.target.head.dtype

    @property
    def device(self) -> torch.device:
        return self.target.head.device

    def embed(self, token: Tensor) -> Tensor:
        return self.target.embed(token.flatten()).view(*token.shape, -1)

    def best(self, hidden: Tensor, k: int, ops: Ops) -> tuple[Tensor, Tensor]:
        token, score = ops.merge_topk(self.parts(hidden.flatten(0, -2), k, ops))
        return token.view(*hidden.shape[:-1], k), score.view(*hidden.shape[:-1], k)

    def parts(self, hidden: Tensor, k: int, ops: Ops) -> PartialTopk:
        """hidden [M, E] -> the best of every rank's part of the vocabulary, [ranks, M, ..]."""
        target = self.target
        logits = target.own_logits(hidden)
        own = ops.topk_partial(logits, k, target.shard.rank * logits.shape[1])
        words = [x.view(torch.int32) for x in (own.value, own.id, own.mass)]
        joined = target.collectives.all_gather(torch.cat(words, dim=1))  # one message
        by_rank = joined.view(len(logits), target.shard.size, -1).transpose(0, 1)
        value, ids, mass = (x.contiguous() for x in by_rank.split([k, k, 6], dim=2))
        return PartialTopk(value=value.view(torch.float32), id=ids, mass=mass.view(torch.int64))


def tables_of(target: TargetModel) -> Vocabulary:
    """The very tensors of a target: whole where one rank holds it, else split as it is."""
    return TargetTables.shared(target) if target.shard.size == 1 else SplitTables(target)
