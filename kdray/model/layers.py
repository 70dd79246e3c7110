"""The small pieces every layer is made of.

Inside the target's layers weights are [in, out], the transpose of the checkpoint's. On a CPU they
lie so: with 4 to 33 rows x @ W is then faster (17 rows, 256 by 2304, one core: 203 us instead of
301 us). On a GPU they lie as in the checkpoint, an output's weights side by side, as skinny_gemm.cu
reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdray.kernels import reference_fused


class RmsNorm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, for ops.rms_norm and by itself.

    weight [E], eps [] fp32: a tensor, because a Python number costs a conversion at every call.
    """

    weight: Tensor
    eps: Tensor

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> RmsNorm:
        return cls(weight, torch.tensor(eps, dtype=torch.float32, device=weight.device))

    def __call__(self, x: Tensor) -> Tensor:
        return reference_fused.rms_norm(x, self)


def laid_out(weight: Tensor) -> Tensor:
    """A checkpoint's [.., out, in] as [.., in, out], in memory as the device likes it."""
    return weight.contiguous().mT if weight.is_cuda else weight.mT.contiguous()


def swiglu(gate_up: Tensor) -> Tensor:
    """[.., 2 I], gate then up -> silu(gate) * up [.., I]."""
    return reference_fused.swiglu(gate_up)
