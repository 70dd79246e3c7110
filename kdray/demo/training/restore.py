"""The training modules back from the demo's files, for replay or for a further drafter."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from kdray.demo.tokenizer import DemoTokenizer
from kdray.demo.training.drafter import DemoDrafter
from kdray.demo.training.shapes import MASK_TOKEN, DrafterShape, TargetShape
from kdray.demo.training.target import DemoTarget


def load_target(folder: Path) -> DemoTarget:
    """The target of a folder that ``save_target`` wrote, frozen, in fp32."""
    shape = TargetShape()
    public = load_file(folder / "model.safetensors")
    target = DemoTarget(shape)
    state = {
        name: _wide(public, name, shape) if ".mlp.experts_" in name else public[_public(name)]
        for name in target.state_dict()
    }
    target.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return target.eval().requires_grad_(False)


def load_drafter(folder: Path, target: DemoTarget, tokenizer: DemoTokenizer) -> DemoDrafter:
    """The drafter of a folder, frozen; its mask row comes from the target's table."""
    state = load_file(folder / "model.safetensors")
    row = tokenizer.special_ids[MASK_TOKEN]
    state["mask_row"] = target.embed_tokens.weight[row : row + 1].clone()
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    drafter = DemoDrafter(DrafterShape(layers=layers))
    drafter.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return drafter.eval().requires_grad_(False)


def _public(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _wide(public: dict[str, Tensor], name: str, shape: TargetShape) -> Tensor:
    """The wide product that stacks all experts, the shared one last."""
    layer, projection = _public(name).split(".experts_")
    experts = [f"{layer}.experts.{index}" for index in range(shape.experts)]
    parts = [
        public[f"{expert}.{projection}_proj.weight"]
        for expert in (*experts, f"{layer}.shared_experts")
    ]
    return torch.cat(parts, dim=1 if projection == "down" else 0)
