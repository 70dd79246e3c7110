"""The part of the target a drafter borrows: its embedding and its head, whole."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kdray.config import LoadFormat
from kdray.errors import ConfigError
from kdray.model.config import ModelConfig
from kdray.model.dummy_weights import target_tensors
from kdray.model.target import TargetModel
from kdray.model.weight_source import weight_source


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetTables:
    """embedding, head   [V, E], every row of the vocabulary"""

    embedding: Tensor
    head: Tensor

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
