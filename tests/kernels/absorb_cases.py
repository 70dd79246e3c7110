"""absorb_query against the two launches it stands for, to the bit.

Used for the kernel on a GPU and for its source on the CPU. Inputs are made on the CPU from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.kernels import cuda_absorb, latent_rows
from kdray.kernels.cuda import CudaOps
from tests.kernels.fused_cases import Attention, SomeNorm, SomeRows, some_norm
from tests.kernels.gemm_cases import drawn, settle


@dataclass(eq=False)
class Absorbing:
    """A layer's arrays: kv is the end of a wider product, and the last row is one of padding."""

    query: Tensor
    kv: Tensor
    cache: Tensor
    rows: SomeRows
    norm: SomeNorm
    key_up: Tensor

    @classmethod
    def of(cls, ops: CudaOps, tokens: int, sizes: Attention, fp8: bool) -> Absorbing:
        device, (heads, nope, rope, latent) = ops.device, sizes
        slots = 2 * tokens + 3
        slot = torch.randperm(slots, generator=torch.Generator().manual_seed(tokens))[:tokens]
        slot[-1] = -1
        angle = drawn(3, tokens, rope // 2).float()
        turns = torch.polar(torch.ones_like(angle), angle)
        cache = drawn(4, slots, latent + rope).to(device)
        if fp8:
            width = latent_rows.row_bytes(latent, rope)
            cache = torch.full((slots, width), 0xFF, dtype=torch.uint8, device=device)
        given = cls(
            query=drawn(1, tokens, heads, nope + rope).to(device),
            kv=drawn(2, tokens, 64 + latent + rope).to(device)[:, 64:],
            cache=cache,
            rows=SomeRows(turns.to(device), slot.to(device)),
            norm=some_norm(latent, torch.bfloat16, device),
            key_up=drawn(5, heads, latent, nope).to(device).mT,
        )
        settle(device)
        return given

    def at_once(self, ops: CudaOps, cache: Tensor) -> Tensor:
        assert cuda_absorb.takes(self.query, self.kv, cache, self.rows, self.norm, self.key_up)
        return ops.absorb_query(self.query, self.kv, cache, self.rows, self.norm, self.key_up)

    def one_by_one(self, ops: CudaOps, cache: Tensor) -> Tensor:
        _, nope, latent = self.key_up.shape
        absorbed = ops.rope_cache(self.query, self.kv, cache, self.rows, self.norm)
        ops.per_head(self.query[..., :nope], self.key_up, absorbed[..., :latent])
        return absorbed


def check_absorb(ops: CudaOps, tokens: int, sizes: Attention, fp8: bool = False) -> None:
    given = Absorbing.of(ops, tokens, sizes, fp8)
    caches = given.cache.clone(), given.cache.clone()
    found, wanted = given.at_once(ops, caches[0]), given.one_by_one(ops, caches[1])
    assert torch.equal(found, wanted)
    assert torch.equal(*caches)
    assert tokens == 1 or not torch.equal(caches[0], given.cache)
