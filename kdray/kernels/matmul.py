"""x @ weight, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

# Other CPUs have no 16-bit products: torch's own took 20 ms for 100 rows by 256 by 512, and 0.4 ms
# by way of float32 (AVX2, one core).
_HAS_16_BIT_PRODUCTS = torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """As torch.matmul; sums are fp32, rounded once."""
    if _HAS_16_BIT_PRODUCTS or x.dtype.itemsize != 2 or not x.is_cpu:
        return x @ weight
    return (x.float() @ weight.float()).to(x.dtype)
