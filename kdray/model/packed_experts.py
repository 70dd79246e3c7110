"""A layer's routed experts kept as the INT4 they are stored as, in the layout of their kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kdray.kernels.moe_layout import Int4, PackedExperts, pack, woven
from kdray.model.checkpoint import Checkpoint
from kdray.model.config import ModelConfig
from kdray.model.int4 import packed_parts, unpack
from kdray.model.parallel import Shard

AT_A_TIME = 16  # experts packed by one run of small kernels, which bounds what lies about


def read_experts(
    checkpoint: Checkpoint, config: ModelConfig, shard: Shard, root: str, device: torch.device
) -> PackedExperts:
    """This rank's part of the experts under `root`, all of them stored packed."""
    part = shard.slice_of(config.moe_intermediate_size)
    packed = PackedExperts.empty(
        config.n_routed_experts, config.hidden_size, part.stop - part.start, device
    )
    for first in range(0, config.n_routed_experts, AT_A_TIME):
        some = slice(first, min(first + AT_A_TIME, config.n_routed_experts))
        names = [f"{root}.experts.{expert}" for expert in range(some.start, some.stop)]
        gate, up, down = _read(checkpoint, names, part)
        packed.gate_up[some] = pack(woven(gate, up))
        packed.down[some] = pack(down)
    return packed


def are_packed(checkpoint: Checkpoint, config: ModelConfig, root: str) -> bool:
    """Whether every expert is stored as INT4."""
    return all(
        f"{root}.experts.{expert}.{name}_proj.weight_packed" in checkpoint
        for expert in range(config.n_routed_experts)
        for name in ("gate", "up", "down")
    )


def _read(checkpoint: Checkpoint, names: list[str], part: slice) -> tuple[Int4, Int4, Int4]:
    """gate, up [n, I, E] and down [n, E, I] of n experts, read side by side.

    Scales of another dtype than bf16 are rounded to it.
    """
    cuts = {"gate": (part, None), "up": (part, None), "down": (None, part)}
    linears = [(f"{name}.{which}_proj", *cut) for which, cut in cuts.items() for name in names]
    tensors = checkpoint.several([half for linear in linears for half in packed_parts(*linear)])
    each = 2 * len(names)
    gate, up, down = (_stacked(tensors[at : at + each]) for at in range(0, 3 * each, each))
    return gate, up, down


def _stacked(tensors: list[Tensor]) -> Int4:
    """Words and scales by turns, of n linears."""
    packed, scale = torch.stack(tensors[::2]), torch.stack(tensors[1::2])
    return Int4(unpack(packed), scale.to(torch.bfloat16))
