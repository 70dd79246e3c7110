"""The small ops of a layer as kernels: rms_norm.cu, rope_cache.cu, swiglu.cu, route_experts.cu.

What a kernel does not take (float16, widths of no whole vectors, rows that are not aligned) runs by
reference_fused.py on the same device. Nothing waits for the device; all may be captured in a graph.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from kdray.kernels import latent_rows
from kdray.kernels import reference_fused as reference
from kdray.kernels.loader import KernelLoader
from kdray.kernels.ops import LiveRows, Norm, PlacedRows, RoutingRule

DTYPES = (torch.bfloat16, torch.float32)
WARP = 32
VECTOR_BYTES = 16

# As in the .cu files.
MAX_ITEMS = 8  # vectors a thread of rms_norm holds
MAX_LATENT, MAX_ROPE = 1024, 128
MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K = 1024, 32, 32

MOST_NORM_THREADS = 512
MOST_ROPE_WARPS = 8
MOST_SWIGLU_THREADS = 256


class CudaFused:
    """The fused ops of kernels.ops.Ops on one device. Holds no workspace."""

    def __init__(self, loader: KernelLoader) -> None:
        self._loader = loader
        self.device = loader.device

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        if not takes_norm(x, norm):
            return reference.rms_norm(x, norm)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._norm(out, None, x, None, norm)
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if not takes_norm(x, norm) or not _is_packed(delta, x):
            return reference.add_rms_norm(x, delta, norm)
        out, total = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device).unbind()
        self._norm(out, total, x, delta, norm)
        return total, out

    def rope_cache(
        self, query: Tensor, kv: Tensor, cache: Tensor, rows: PlacedRows, norm: Norm
    ) -> Tensor:
        """As in Ops, but that a slot outside the cache stands for a row of padding."""
        if not takes_rope(query, kv, cache, rows, norm):
            return reference.rope_cache(query, kv, cache, rows, norm)
        (num_rows, heads, _), latent_dim = query.shape, norm.weight.shape[0]
        key_dim = kv.shape[1] - latent_dim
        absorbed = query.new_empty(num_rows, heads, latent_dim + key_dim)
        rotated, turning = absorbed[..., latent_dim:], query[..., -key_dim:]
        if num_rows:
            vector = _vector(kv.dtype)
            warps = 1 + -(-heads * key_dim // (vector * WARP))
            deep = min(warps, MOST_ROPE_WARPS)
            steps = (kv.stride(0), *turning.stride()[:2], *rotated.stride()[:2])
            cache_row = cache.stride(0) * cache.itemsize // VECTOR_BYTES
            outputs = (cache, rotated)
            inputs = (kv, turning, rows.turns, rows.slot, norm.weight, norm.eps)
            sizes = (len(cache), heads, *(step // vector for step in steps), cache_row)
            defines = rope_defines(latent_dim, key_dim, kv.dtype, latent_rows.is_fp8(cache))
            kernel = self._loader.get("rope_cache", "rope_cache", defines)
            grid, block = (num_rows, -(-warps // deep)), (WARP, deep)
            kernel.launch(grid, block, (*outputs, *inputs, *sizes), overlap=True)
        return absorbed

    def per_head(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """As in Ops: cuBLAS writes rows any distance apart, which saves a copy."""
        if out is None:
            out = x.new_empty(*x.shape[:2], weight.shape[2])
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        if not takes_swiglu(gate_up):
            return reference.swiglu(gate_up)
        inner = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], inner)
        if out.numel():
            vectors = inner // _vector(gate_up.dtype)
            threads = min(_whole_warps(vectors), MOST_SWIGLU_THREADS)
            grid = (out.numel() // inner, -(-vectors // threads))
            kernel = self._loader.get("swiglu", "swiglu", swiglu_defines(gate_up.dtype))
            kernel.launch(grid, threads, (out, gate_up, vectors), overlap=True)
        return out

    def route_experts(
        self, logits: Tensor, bias: Tensor, rule: RoutingRule, live: LiveRows | None = None
    ) -> tuple[Tensor, Tensor]:
        if not takes_routing(logits, bias, rule):
            return reference.route_experts(logits, bias, rule, live)
        rows, experts = logits.shape
        expert = torch.empty((rows, rule.top_k), dtype=torch.int64, device=logits.device)
        weight = torch.empty((rows, rule.top_k), dtype=torch.float32, device=logits.device)
        if rows:
            facts = (int(rule.normalize), np.float32(rule.scale))
            kernel = self._loader.get(
                "route_experts", "route_experts", routing_defines(experts, rule)
            )
            padding = (live.slot, live.num_nodes) if live else (None, None)
            arrays = (expert, weight, logits, bias)
            grid = (live.nodes, rows // live.nodes) if live else rows
            kernel.launch(grid, _whole_warps(experts), (*arrays, *facts, *padding), overlap=True)
        return expert, weight

    def _norm(
        self, out: Tensor, total: Tensor | None, x: Tensor, delta: Tensor | None, norm: Norm
    ) -> None:
        rows = x.reshape(-1, x.shape[-1])  # a view: its rows are one step apart
        if not len(rows):
            return
        defines = norm_defines(x.shape[-1], x.dtype)
        kernel = self._loader.get("rms_norm", "rms_norm", defines)
        arrays = (out, total, rows, delta, norm.weight, norm.eps)
        step = rows.stride(0) // _vector(x.dtype)
        kernel.launch(len(rows), int(defines["THREADS"]), (*arrays, step), overlap=True)


@cache
def norm_defines(width: int, dtype: torch.dtype) -> dict[str, str | int]:
    """What rms_norm.cu is compiled with: few vectors a thread, shared evenly."""
    vectors = width // _vector(dtype)
    items = -(-vectors // MOST_NORM_THREADS)
    threads = _whole_warps(-(-vectors // items))
    return {"WIDTH": width, "INPUT_BF16": _is_bf16(dtype), "THREADS": threads}


@cache
def rope_defines(
    latent_dim: int, rope_dim: int, dtype: torch.dtype, fp8: bool = False
) -> dict[str, str | int]:
    found: dict[str, str | int] = {"LATENT_DIM": latent_dim, "ROPE_DIM": rope_dim}
    return found | {"INPUT_BF16": _is_bf16(dtype)} | ({"KV_FP8": 1} if fp8 else {})


@cache
def swiglu_defines(dtype: torch.dtype) -> dict[str, str | int]:
    return {"INPUT_BF16": _is_bf16(dtype)}


@cache
def routing_defines(num_experts: int, rule: RoutingRule) -> dict[str, str | int]:
    return {
        "NUM_EXPERTS": num_experts,
        "TOP_K": rule.top_k,
        "NUM_GROUPS": rule.num_groups,
        "TOP_GROUPS": rule.top_groups,
    }


def takes_norm(x: Tensor, norm: Norm) -> bool:
    """Whether rms_norm.cu takes rows x [.., E]: contiguous, or [T, E] at any aligned step."""
    width, weight = x.shape[-1], norm.weight
    if not _alike(x, weight) or weight.shape != (width,):
        return False
    fits = 0 < width // _vector(x.dtype) <= MAX_ITEMS * MOST_NORM_THREADS
    even = x.dim() <= 2 or x.is_contiguous()
    return fits and even and _in_vectors(x) and _in_vectors(weight)


def takes_rope(query: Tensor, kv: Tensor, cache: Tensor, rows: PlacedRows, norm: Norm) -> bool:
    """Whether rope_cache.cu takes these; the cache holds rows of kv's dtype, or in fp8."""
    (num_rows, width), latent_dim = kv.shape, norm.weight.shape[0]
    key_dim = width - latent_dim
    if not _alike(kv, query, norm.weight) or not _takes_cache(cache, kv, latent_dim):
        return False
    if not 0 < latent_dim <= MAX_LATENT or not 0 < key_dim <= MAX_ROPE:
        return False
    turns, slot, vector = rows.turns, rows.slot, _vector(kv.dtype)
    whole = all(_in_vectors(t) for t in (query[..., -key_dim:], kv, norm.weight))
    parts = latent_dim % vector == 0 and key_dim % vector == 0 and query.shape[0] == num_rows
    placed = turns.shape == (num_rows, key_dim // 2) and slot.shape == (num_rows,)
    typed = turns.dtype == torch.complex64 and slot.dtype == torch.int64
    packed = all(t.is_contiguous() for t in (turns, slot))
    return whole and parts and placed and typed and packed and len(cache) < 2**31


def _takes_cache(cache: Tensor, kv: Tensor, latent_dim: int) -> bool:
    """Whether rows of kv [T, C + D] fit the cache's: of the same dtype, or in fp8."""
    width = kv.shape[1]
    if latent_rows.is_fp8(cache):
        width = latent_rows.row_bytes(latent_dim, width - latent_dim)
        fits = kv.dtype == torch.bfloat16 and latent_dim % 16 == 0
    else:
        fits = cache.dtype == kv.dtype
    return fits and cache.device == kv.device and cache.shape[1] == width and _in_vectors(cache)


def takes_swiglu(gate_up: Tensor) -> bool:
    if not _alike(gate_up) or not gate_up.is_contiguous():
        return False
    inner = gate_up.shape[-1] // 2
    return inner > 0 and inner % _vector(gate_up.dtype) == 0 and _in_vectors(gate_up)


def takes_routing(logits: Tensor, bias: Tensor, rule: RoutingRule) -> bool:
    experts = logits.shape[1]
    fits = experts <= MAX_EXPERTS and rule.num_groups <= MAX_GROUPS and rule.top_k <= MAX_TOP_K
    whole = experts % rule.num_groups == 0 and rule.top_k <= experts and bias.shape == (experts,)
    fp32 = logits.dtype == torch.float32 and _alike(logits, bias)
    return fits and whole and fp32 and logits.is_contiguous() and bias.is_contiguous()


def _alike(*tensors: Tensor) -> bool:
    """Whether all are of one dtype that kernels know, on one device."""
    dtype, device = tensors[0].dtype, tensors[0].device
    return dtype in DTYPES and all(t.dtype == dtype and t.device == device for t in tensors)


def _is_bf16(dtype: torch.dtype) -> int:
    return int(dtype == torch.bfloat16)


def _vector(dtype: torch.dtype) -> int:
    """Numbers in a vector of 16 bytes."""
    return VECTOR_BYTES // dtype.itemsize


def _whole_warps(threads: int) -> int:
    return -(-threads // WARP) * WARP


def _in_vectors(x: Tensor) -> bool:
    """Whether the last dimension is whole vectors, neighbours in memory, wherever a row starts."""
    vector = _vector(x.dtype)
    steps = [step for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return (
        x.stride(-1) == 1
        and x.shape[-1] % vector == 0
        and x.data_ptr() % VECTOR_BYTES == 0
        and all(step % vector == 0 for step in steps)
    )


def _is_packed(delta: Tensor, x: Tensor) -> bool:
    """Whether delta fits x and lies without gaps."""
    return (
        delta.shape == x.shape and _alike(x, delta) and delta.is_contiguous() and _in_vectors(delta)
    )
