"""Few rows times a matrix, in torch, for any device: the oracle of skinny_gemm.cu.

Matrices are [in, out] here, whichever way they lie in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdray.kernels.matmul import matmul
from kdray.kernels.ops import Norm
from kdray.kernels.reference_fused import rms_norm, swiglu


def linear(
    x: Tensor, weight: Tensor, *, dtype: torch.dtype | None = None, add: Tensor | None = None
) -> Tensor:
    """As in Ops."""
    dtype = x.dtype if dtype is None else dtype
    if x.dtype == weight.dtype == dtype:
        product = matmul(x, weight)
    elif x.is_cuda and x.dtype == weight.dtype and dtype == torch.float32:
        product = torch.mm(x, weight, out_dtype=dtype)
    else:
        product = x.to(dtype) @ weight.to(dtype)
    return product if add is None else add + product


def norm_linear(x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
    """As in Ops."""
    return linear(rms_norm(x, norm), weight)


def gated_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    """As in Ops."""
    return swiglu(linear(x, gate_up))


def linear_and_gated(
    x: Tensor, weight: Tensor, gate_up: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """As in Ops."""
    return linear(x, weight, dtype=dtype), gated_linear(x, gate_up)
