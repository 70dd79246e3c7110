"""The CUDA ops in forms whose bits for a row do not depend on what else is in its step.

Products of up to 128 rows (skinny_gemm.cu) and experts in INT4 (moe_w4a16.cu) have that property by
themselves; more rows are multiplied in slices. Attention has kernels of its own. What these kernels
do not take runs by the library's call over exactly FIXED_ROWS rows at a time: the same code for
every row, wherever it stands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels import cuda_gemm, cuda_moe, reference_gemm
from kdray.kernels.attention_rows import AnyAttentionBatch
from kdray.kernels.cuda import CudaOps
from kdray.kernels.cuda_invariant import CudaInvariantAttention
from kdray.kernels.fixed_rows import FIXED_ROWS, at_fixed_size, in_slices
from kdray.kernels.loader import KernelLoader
from kdray.kernels.moe_layout import PackedExperts


class InvariantOps(CudaOps):
    """kernels.ops.Ops on one CUDA device, for rows of bfloat16. As CudaOps to its callers."""

    batch_invariant = True

    def __init__(self, device: torch.device, loader: KernelLoader | None = None) -> None:
        super().__init__(device, loader)
        self._invariant_attention = CudaInvariantAttention(self.loader)

    def verify_attention(
        self,
        query: Tensor,
        cache: Tensor,
        batch: AnyAttentionBatch,
        scale: float,
        latent_dim: int,
    ) -> Tensor:
        return self._invariant_attention.verify_attention(query, cache, batch, scale, latent_dim)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        dtype: torch.dtype | None = None,
        add: Tensor | None = None,
    ) -> Tensor:
        def product(rows: Tensor) -> Tensor:
            if cuda_gemm.takes(rows, weight) and (dtype or x.dtype) in cuda_gemm.OUT_DTYPES:
                return self._gemm.linear(rows, weight, dtype=dtype)
            return at_fixed_size(rows, lambda x: reference_gemm.linear(x, weight, dtype=dtype))

        out = in_slices(x, product)
        return out if add is None else out + add

    def gated_linear(self, x: Tensor, gate_up: Tensor) -> Tensor:
        def product(rows: Tensor) -> Tensor:
            if cuda_gemm.takes_gated(rows, gate_up):
                return self._gemm.gated_linear(rows, gate_up)
            return at_fixed_size(rows, lambda x: reference_gemm.gated_linear(x, gate_up))

        return in_slices(x, product)

    def linear_and_gated(
        self, x: Tensor, weight: Tensor, gate_up: Tensor, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        if cuda_gemm.takes(x, weight) and cuda_gemm.takes_gated(x, gate_up):
            return super().linear_and_gated(x, weight, gate_up, dtype=dtype)
        return self.linear(x, weight, dtype=dtype), self.gated_linear(x, gate_up)

    def per_head(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = x.new_empty(*x.shape[:2], weight.shape[2])
        slices = (tensor.split(FIXED_ROWS) for tensor in (x, out))
        for rows, to in zip(*slices, strict=True):
            if cuda_gemm.takes_heads(rows, weight, to):
                self._gemm.per_head(rows, weight, to)
            else:
                to.copy_(at_fixed_size(rows, lambda x: self._fused.per_head(x, weight)))
        return out

    def moe_w4a16(
        self,
        x: Tensor,
        expert: Tensor,
        weight: Tensor,
        experts: PackedExperts,
        shared: Tensor,
    ) -> Tensor:
        if len(x) and not cuda_moe.takes(x, expert, weight, experts, shared):
            raise KernelError(
                f"batch-invariant experts take no rows of {x.shape[1]} numbers in {x.dtype}, or no "
                "experts of these sizes; leave batch_invariant out"
            )
        return super().moe_w4a16(x, expert, weight, experts, shared)
