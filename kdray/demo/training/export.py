"""The files of the demo: public checkpoint names, bf16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kdray.demo.tokenizer import DemoTokenizer, save_tokenizer
from kdray.demo.training.drafter import DemoDrafter
from kdray.demo.training.shapes import (
    MASK_TOKEN,
    TargetShape,
    drafter_config,
    generation_config,
    target_config,
)
from kdray.demo.training.target import DemoTarget

_HEAD = "lm_head."
_KEPT_FP32 = "e_score_correction_bias"


def save_target(
    target: DemoTarget, tokenizer: DemoTokenizer, mask_row: Tensor, folder: Path
) -> None:
    """Write the target's folder; ``mask_row`` [1, hidden] becomes the mask token's embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = target_tensors(target)
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[tokenizer.special_ids[MASK_TOKEN]] = mask_row[0].cpu().bfloat16()
    tensors["model.embed_tokens.weight"] = embedding
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", target_config(target.shape, tokenizer))
    _write_json(folder / "generation_config.json", generation_config(tokenizer))
    save_tokenizer(tokenizer, folder)


def save_drafter(
    drafter: DemoDrafter, target: TargetShape, tokenizer: DemoTokenizer, folder: Path
) -> None:
    """Write the drafter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().cpu().bfloat16().contiguous()
        for name, tensor in drafter.state_dict().items()
        if name != "mask_row"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", drafter_config(drafter.shape, target, tokenizer))


def target_tensors(target: DemoTarget) -> dict[str, Tensor]:
    """Tensors under the names of public DeepSeek-V3 checkpoints; bf16 but for router biases."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in target.state_dict().items():
        public = name if name.startswith(_HEAD) else f"model.{name}"
        value = tensor.detach().cpu()
        if ".mlp.experts_" in public:
            tensors.update(_experts(public, value, target.shape))
        else:
            tensors[public] = value.float() if public.endswith(_KEPT_FP32) else value
    return {
        name: (value if name.endswith(_KEPT_FP32) else value.bfloat16()).contiguous()
        for name, value in tensors.items()
    }


def _experts(name: str, wide: Tensor, shape: TargetShape) -> dict[str, Tensor]:
    """Split a wide product into its experts; the last one is the shared expert."""
    layer, projection = name.split(".experts_")
    across = 1 if projection == "down" else 0
    parts = wide.split(shape.expert_width, dim=across)
    named = {
        f"{layer}.experts.{index}.{projection}_proj.weight": part
        for index, part in enumerate(parts[:-1])
    }
    return {**named, f"{layer}.shared_experts.{projection}_proj.weight": parts[-1]}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def parameter_count(module: torch.nn.Module) -> int:
    """Parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())
