"""The reference of a target whose experts are INT4: everything in float32, by torch alone.

Experts are read from the checkpoint as they are stored and dequantised as they are needed, one at a
time: nothing of the layout, the routing or the kernels of the product takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kdray.kernels.ops import LiveRows, Ops
from kdray.kernels.reference import ReferenceOps
from kdray.model.checkpoint import Checkpoint
from kdray.model.config import INT4_GROUP, ModelConfig
from kdray.model.int4 import PackedWeight, dequantize, packed_parts, unpack
from kdray.model.moe import DenseMLP, Router
from kdray.model.parallel import Shard
from kdray.model.placed import PlacedCheckpoint
from kdray.model.target import TargetModel
from kdray.model.weights import WeightReader, load_threads

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class StoredExpert(NamedTuple):
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight


@dataclass(frozen=True, eq=False)
class StoredMoE:
    """Experts as stored, on the device; as MoE.partial in float32.

    rounded   a weight is q * scale rounded to bf16, as the format's own reference has it and as
              experts that are not kept packed are read; else it is exact
    """

    router: Router
    experts: Sequence[StoredExpert]
    shared: DenseMLP
    rounded: bool

    def partial(self, x: Tensor, live: LiveRows | None = None) -> Tensor:
        """Of every row."""
        expert, weight = self.router.route(x)
        total = torch.zeros_like(x)
        for number in expert.unique().tolist():
            row, choice = (expert == number).nonzero(as_tuple=True)
            gate, up, down = (self._values(stored) for stored in self.experts[number])
            rows = x[row]
            output = (F.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
            total.index_add_(0, row, output * weight[row, choice, None])
        return total + self.shared.partial(x)

    def _values(self, stored: PackedWeight) -> Tensor:
        """[out, in] float32."""
        if self.rounded:
            return dequantize(stored).float()
        scale = stored.scale.float().repeat_interleave(INT4_GROUP, dim=-1)
        return unpack(stored.packed).float() * scale


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredReader(WeightReader):
    """Reads a rank that is alone, in float32, its experts as they are stored."""

    rounded: bool

    def mlp(self, layer: int, ops: Ops) -> DenseMLP | StoredMoE:  # type: ignore[override]
        if not self.config.is_moe(layer):
            return DenseMLP(ops, *self._dense(f"model.layers.{layer}.mlp", self._inner))
        root = f"model.layers.{layer}.mlp"
        weight = self.checkpoint.tensor(f"{root}.gate.weight").to(self.device)
        bias = self.checkpoint.tensor(f"{root}.gate.e_score_correction_bias").to(self.device)
        shared = self.config.moe_intermediate_size * self.config.n_shared_experts
        return StoredMoE(
            router=Router.of(self.config, self._router(weight), bias, ops),
            experts=self._stored(f"{root}.experts"),
            shared=DenseMLP(ops, *self._dense(f"{root}.shared_experts", shared)),
            rounded=self.rounded,
        )

    @property
    def _inner(self) -> int:
        return self.config.intermediate_size

    def _stored(self, root: str) -> list[StoredExpert]:
        names = [f"{root}.{x}" for x in range(self.config.n_routed_experts)]
        parts = [
            part
            for name in names
            for which in PROJECTIONS
            for part in packed_parts(f"{name}.{which}", None, None)
        ]
        found = [tensor.to(self.device) for tensor in self.checkpoint.several(parts)]
        weights = [PackedWeight(*found[i : i + 2]) for i in range(0, len(found), 2)]
        return [StoredExpert(*weights[i : i + 3]) for i in range(0, len(weights), 3)]


def load_reference(folder: Path, device: torch.device, *, rounded: bool) -> TargetModel:
    """The whole model of a checkpoint; its MoE layers are StoredMoE."""
    config, threads = ModelConfig.from_folder(folder), load_threads(device)
    with closing(PlacedCheckpoint(Checkpoint.open(folder), device, threads=threads)) as placed:
        reader = StoredReader(
            checkpoint=placed,
            config=config,
            shard=Shard(),
            dtype=torch.float32,
            device=device,
            threads=threads,
            rounded=rounded,
        )
        return TargetModel.read(reader, ops=ReferenceOps(device))
