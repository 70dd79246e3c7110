"""Launches absorb_query.cu: rope_cache and W_UK's product of the queries at once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kdray.kernels import cuda_fused, latent_rows
from kdray.kernels.cuda_fused import VECTOR_BYTES
from kdray.kernels.cuda_gemm import CudaGemm, Cut, defines, takes_heads
from kdray.kernels.gemm_plan import GemmPlan, GemmShape, token_tiles_for
from kdray.kernels.gemm_table import plan_for
from kdray.kernels.ops import Norm, PlacedRows


def takes(
    query: Tensor, kv: Tensor, cache: Tensor, rows: PlacedRows, norm: Norm, key_up: Tensor
) -> bool:
    """Whether both kernels take these, whose launch it then is."""
    heads, nope, latent_dim = key_up.shape
    key_dim = query.shape[2] - nope
    return (
        query.dtype == torch.bfloat16
        and (heads, latent_dim) == (query.shape[1], norm.weight.shape[0])
        and key_dim == kv.shape[1] - latent_dim
        and takes_heads(query[..., :nope], key_up, None)
        and cuda_fused.takes_rope(query, kv, cache, rows, norm)
    )


def absorb_query(
    gemm: CudaGemm,
    query: Tensor,
    kv: Tensor,
    cache: Tensor,
    rows: PlacedRows,
    norm: Norm,
    key_up: Tensor,
) -> Tensor:
    """As in Ops, for what `takes` allows; a slot outside the cache stands for a row of padding."""
    (tokens, heads, width), (_, nope, latent_dim) = query.shape, key_up.shape
    key_dim = width - nope
    absorbed = query.new_empty(tokens, heads, latent_dim + key_dim)
    shape = GemmShape(nope, latent_dim, heads)
    cut = Cut(gemm.plan or plan_for(shape, token_tiles_for(tokens)), shape, tokens)
    fp8 = latent_rows.is_fp8(cache)
    strides = (
        *query.stride()[:2],
        *(key_up.stride(2), key_up.stride(0)),
        *absorbed.stride()[:2],
        *(kv.stride(0), cache.stride(0) * cache.itemsize // VECTOR_BYTES),
    )
    gemm.start(
        "absorb_query",
        absorb_defines(cut.plan, cut.tiles, shape, cut.groups, key_dim, fp8),
        cut,
        (absorbed, cache, query, key_up, kv, norm.weight, rows.turns, rows.slot, norm.eps),
        (nope, heads, len(cache), *strides),
        slices=1,
    )
    return absorbed


@cache
def absorb_defines(
    plan: GemmPlan, token_tiles: int, shape: GemmShape, groups: int, key_dim: int, fp8: bool
) -> dict[str, str | int]:
    """What absorb_query.cu is compiled with."""
    product = defines(plan, token_tiles, shape.steps, groups, False, torch.bfloat16)
    rope = cuda_fused.rope_defines(shape.outputs, key_dim, torch.bfloat16, fp8)
    unsaid = ("GATED", "OUT_FP32", "INPUT_BF16")
    return {name: value for name, value in (product | rope).items() if name not in unsaid}
