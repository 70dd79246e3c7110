"""A drafter's MLPs in INT4, rounded as they are loaded, multiplied by the experts' kernel.

moe_w4a16 takes experts of a SwiGLU each. A whole MLP as one of them would leave its second half to
the few warps that own 32 outputs each, so it is cut along its intermediate size into parts, each
an expert that every row takes with weight 1: their sum is the MLP's output.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kdray.config import DraftWeightType
from kdray.errors import ConfigError
from kdray.kernels.moe_layout import TILE, Int4, PackedExperts
from kdray.kernels.ops import Ops
from kdray.kernels.reference_moe import values
from kdray.model.dflash_config import DFlashConfig
from kdray.model.int4 import quantize, unpack

# whole: in the drafter's dtype. rounded: INT4's values, held in that dtype. packed: INT4.
MlpForm = Literal["whole", "rounded", "packed"]

PART = 2048  # of the intermediate size, at most: K2.6's 18432 are 9 parts, 2016 warps of outputs
MOST_PARTS = 32  # of which a row can take all
ROWS = 2048  # that are multiplied at a time


def mlp_form(wish: DraftWeightType, dtype: torch.dtype, device: torch.device) -> MlpForm:
    """How a wish is kept: packed where there is a kernel for it, else the same values unpacked."""
    if wish == "auto":
        return "whole"
    return "packed" if device.type == "cuda" and dtype == torch.bfloat16 else "rounded"


def check_groups(config: DFlashConfig) -> None:
    """ConfigError unless the MLPs are whole tiles, groups of 32 inputs among them."""
    part, way_out = "", "leave draft_weights at 'auto'"
    if config.ranks > 1:
        part, way_out = f" on each of {config.ranks} ranks", f"{way_out}, or use draft_tp 1"
    for name in ("hidden_size", "intermediate_size"):
        if (size := getattr(config, name)) % TILE:
            raise ConfigError(
                f"the drafter's {name} {size}{part} is no multiple of {TILE}, as INT4 weights want "
                f"it; {way_out}"
            )


def part_of(inner: int) -> int:
    """The intermediate size of a part: the largest up to PART, or more where that is too many."""
    tiles = inner // TILE
    counts = [n for n in range(1, MOST_PARTS + 1) if tiles % n == 0]
    return inner // next((n for n in counts if inner // n <= PART), counts[-1])


def int4_of(weight: Tensor) -> Int4:
    """[.., out, in] -> symmetric INT4 in groups of 32 inputs, as K2.6's experts are stored."""
    packed = quantize(weight)
    return Int4(unpack(packed.packed), packed.scale)


def rounded(weight: Tensor) -> Tensor:
    """[.., out, in] -> the values of its INT4, in float32, which holds them exactly."""
    return values(int4_of(weight))


class EveryPart(NamedTuple):
    """Rows that take every part: expert [ROWS, parts] int64, weight [ROWS, parts] fp32, all 1."""

    expert: Tensor
    weight: Tensor

    @classmethod
    def of(cls, parts: int, device: torch.device) -> EveryPart:
        return cls(
            torch.arange(parts, device=device).repeat(ROWS, 1),
            torch.ones(ROWS, parts, device=device),
        )


class PackedDraftMLP(NamedTuple):
    """parts as experts of moe_w4a16, and who takes them, which a drafter's layers share."""

    parts: PackedExperts
    every: EveryPart

    def partial(self, ops: Ops, normed: Tensor) -> Tensor:
        """As DraftMLP. A part's output is rounded once, their sum, in fp32, once more."""
        nothing = torch.zeros_like(normed[:ROWS])  # the kernel adds its experts to something
        outputs = [
            ops.moe_w4a16(
                rows,
                self.every.expert[: len(rows)],
                self.every.weight[: len(rows)],
                self.parts,
                nothing[: len(rows)],
            )
            for rows in normed.split(ROWS)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
