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
from kdray.core.tree import ABSENT, FRACTION_BITS, MIN_LOGPROB
from kdray.errors import ConfigError
from kdray.kernels.ops import Ops
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
    a rank's part weighs among all.
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
        parts = self.parts(hidden.flatten(0, -2), k, ops)
        token, score, weight = parts[..., :k], parts[..., k:-1], parts[..., -1]
        best = merge_best(token, score, weight.view(torch.float32))
        return best[0].view(*hidden.shape[:-1], k), best[1].view(*hidden.shape[:-1], k)

    def parts(self, hidden: Tensor, k: int, ops: Ops) -> Tensor:
        """hidden [M, E] -> [M, ranks, 2 k + 1] int32: of every part its best tokens, their scores
        among the part's own, and the bits of the float32 logsumexp of its logits."""
        target = self.target
        logits = target.own_logits(hidden)
        token, score = ops.topk_logprob(logits, k)
        weight = weight_of(logits, token, score).view(torch.int32)
        token = token + target.shard.rank * logits.shape[1]
        joined = target.collectives.all_gather(torch.cat((token, score, weight), dim=1))
        return joined.view(len(logits), target.shard.size, -1)


def tables_of(target: TargetModel) -> Vocabulary:
    """The very tensors of a target: whole where one rank holds it, else split as it is."""
    return TargetTables.shared(target) if target.shard.size == 1 else SplitTables(target)


def weight_of(logits: Tensor, token: Tensor, score: Tensor) -> Tensor:
    """logsumexp [M, 1] of float32 logits [M, V], by the best token of each row and its score.

    topk_logprob has summed them, with NaN as -inf and +inf as the largest number: so it is here.
    """
    largest = torch.finfo(torch.float32).max
    best = logits.gather(1, token[:, :1].long())
    best = best.nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    return best - score[:, :1] * 2.0**-FRACTION_BITS


def merge_best(token: Tensor, score: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The best of all ranks' best: [M, N, K] of N parts -> [M, K].

    token, score   of a part as Ops.topk_logprob finds them, scores among the part's own tokens
    weight         [M, N] float32: logsumexp of the part's logits
    Within a unit of the fixed point equal to topk_logprob of all parts' logits side by side.
    """
    shift = weight - weight.logsumexp(dim=1, keepdim=True)
    shift = torch.round(shift.clamp_min(MIN_LOGPROB) * 2**FRACTION_BITS).int()
    shifted = (score + shift[..., None]).clamp(int(MIN_LOGPROB * 2**FRACTION_BITS), 0)
    shifted = torch.where(score == ABSENT, score, shifted).flatten(1)
    # A stable sort leaves the smaller of equal tokens, which lie in the earlier part, in front.
    order = shifted.argsort(dim=1, descending=True, stable=True)[:, : token.shape[2]]
    return token.flatten(1).gather(1, order), shifted.gather(1, order)
