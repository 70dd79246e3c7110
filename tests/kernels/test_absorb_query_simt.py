"""absorb_query.cu: its own source, run on the CPU."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels.cuda import CudaOps
from kdray.kernels.gemm_plan import GemmPlan
from tests.kernels import absorb_cases as cases
from tests.kernels.fused_cases import Attention
from tests.kernels.simt_loader import simt_loader

SMALL = Attention(heads=3, nope=32, rope=16, latent=64)


def ops_of(seed: int) -> CudaOps:
    return CudaOps(torch.device("cpu"), simt_loader(seed))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 5, 19])
def test_it_is_its_two_launches(tokens: int, fp8: bool) -> None:
    cases.check_absorb(ops_of(2), tokens, SMALL, fp8)


def test_more_rows_than_a_block_takes() -> None:
    cases.check_absorb(ops_of(3), 67, SMALL)


@pytest.mark.parametrize("tokens", [5, 12])
def test_products_of_several_blocks(tokens: int) -> None:
    """A head's matrix is cut over blocks, which leave sums for one another."""
    ops = ops_of(4)
    ops._gemm.plan = GemmPlan(1, 2, 1, 2, 4)
    cases.check_absorb(ops, tokens, Attention(heads=2, nope=64, rope=16, latent=64))
    assert ops._gemm._work is not None and bool((ops._gemm._work == -1).all())


def test_what_the_kernel_does_not_take_is_two_calls() -> None:
    """Queries of no whole steps of 32."""
    ops, sizes = ops_of(2), Attention(heads=2, nope=16, rope=8, latent=32)
    given = cases.Absorbing.of(ops, 3, sizes, fp8=False)
    caches = given.cache.clone(), given.cache.clone()
    arrays = (given.rows, given.norm, given.key_up)
    found = ops.absorb_query(given.query, given.kv, caches[0], *arrays)
    assert torch.equal(found, given.one_by_one(ops, caches[1]))
    assert torch.equal(*caches)
