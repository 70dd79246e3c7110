"""The drafter's rotary embedding: the whole head, in half-split pairs (i, i + D / 2).

The target rotates interleaved pairs of a part of its head; a DFlash drafter does what Qwen3 does,
be it with the target's YaRN numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.model.config import Yarn
from kdray.model.rope import cos_sin_scale, rope_frequencies


class DraftRope:
    """Makes rotations of heads of D numbers. Frequencies are float32, radians per position."""

    def __init__(
        self, head_dim: int, theta: float, yarn: Yarn | None, device: torch.device
    ) -> None:
        frequencies = rope_frequencies(head_dim, theta, yarn).to(device)
        # cos is even and sin odd: the minus of the first half's sine comes with the frequency.
        self._signed = torch.cat((-frequencies, frequencies))
        self._scale = cos_sin_scale(yarn)

    def at(self, position: Tensor) -> Rotation:
        """The rotation of heads [.., H, D] that stand at position [..]."""
        angle = position.to(torch.float32)[..., None, None] * self._signed
        cos, sin = angle.cos(), angle.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        return Rotation(cos=cos, sin=sin)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotation:
    """cos and signed sin [.., 1, D] float32 of some positions; made once, used by every layer."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate heads [.., H, D]: computed in float32, rounded once to x's dtype."""
        wide = x.float()
        swapped = wide.roll(x.shape[-1] // 2, dims=-1)
        return (wide * self.cos + swapped * self.sin).to(x.dtype)
