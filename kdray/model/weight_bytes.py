"""What a rank's weights take, by the model's config alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kdray.model.config import INT4_GROUP, ModelConfig
from kdray.model.dflash_config import DFlashConfig
from kdray.model.dflash_weights import weight_shapes
from kdray.model.draft_int4 import MlpForm
from kdray.model.manifest import needed_tensors

INT4_BYTES = 1 / 2 + 2 / INT4_GROUP  # of a weight: its half byte, and its part of a bf16 scale
FP32_BYTES = 4


class TargetBytes(NamedTuple):
    """One rank's weights: its part of the routed experts, of what else is split, and what every
    rank holds whole, routers apart."""

    experts: int
    split: int
    whole: int
    routers: int

    @property
    def total(self) -> int:
        return sum(self)


def target_bytes(
    config: ModelConfig,
    ranks: int,
    dtype: torch.dtype,
    *,
    packed: bool,
    router_dtype: torch.dtype = torch.float32,
) -> TargetBytes:
    """packed: routed experts stay INT4, as they are stored; else they become `dtype`."""
    experts, split, whole, routers = 0.0, 0.0, 0.0, 0.0
    for needed in needed_tensors(config):
        size = math.prod(needed.shape) * dtype.itemsize
        if ".mlp.gate." in needed.name:
            is_bias = len(needed.shape) == 1
            routers += math.prod(needed.shape) * (FP32_BYTES if is_bias else router_dtype.itemsize)
        elif needed.is_expert and packed:
            experts += math.prod(needed.shape) * INT4_BYTES / ranks
        elif needed.is_expert:
            experts += size / ranks
        elif needed.splits_inputs or needed.splits_outputs:
            split += size / ranks
        else:
            whole += size
    return TargetBytes(round(experts), round(split), round(whole), round(routers))


class DrafterBytes(NamedTuple):
    """Its MLPs, and what else it has: attention, the features' projection, norms."""

    mlps: int
    others: int

    @property
    def total(self) -> int:
        return sum(self)


def drafter_bytes(config: DFlashConfig, dtype: torch.dtype, form: MlpForm) -> DrafterBytes:
    """form: how its MLPs are kept."""
    mlps, others = 0, 0
    for name, shape in weight_shapes(config):
        if ".mlp." in name:
            mlps += math.prod(shape)
        else:
            others += math.prod(shape)
    each = INT4_BYTES if form == "packed" else dtype.itemsize
    return DrafterBytes(round(mlps * each), others * dtype.itemsize)


def table_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """The target's embedding and head, whole, as a drafter reads them."""
    return 2 * config.vocab_size * config.hidden_size * dtype.itemsize
