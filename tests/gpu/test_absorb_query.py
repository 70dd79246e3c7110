"""absorb_query on a GPU: the bits of its two launches, alone and in graphs."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels.cuda import CudaOps
from kdray.kernels.loader import KernelLoader
from tests.gpu.replays import check_replays
from tests.kernels import absorb_cases as cases
from tests.kernels.fused_cases import ATTENTIONS, Attention

pytestmark = pytest.mark.gpu

TOKENS = [1, 4, 8, 9, 16, 17, 33, 64, 65, 128]
SIZES = {name: ATTENTIONS[name] for name in ("kimi, 8 heads", "kimi, 64 heads", "demo")}


@pytest.fixture(scope="module")
def ops(loader: KernelLoader) -> CudaOps:
    return CudaOps(loader.device, loader)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_it_is_its_two_launches(ops: CudaOps, sizes: Attention, fp8: bool) -> None:
    for tokens in TOKENS:
        cases.check_absorb(ops, tokens, sizes, fp8)


@pytest.mark.parametrize("tokens", [1, 9, 65])
def test_it_follows_its_input_in_a_graph(ops: CudaOps, tokens: int) -> None:
    """Between products: one that writes its queries, one that reads what it made."""
    sizes = SIZES["kimi, 8 heads"]
    given = cases.Absorbing.of(ops, tokens, sizes, fp8=False)
    x = torch.zeros(tokens, 1536, dtype=torch.bfloat16, device=ops.device)
    up = (cases.drawn(6, 8 * 192, 1536) * 1536**-0.5).to(ops.device).T
    down = (cases.drawn(7, 512, 8, 576).mul(576**-0.5)).to(ops.device).permute(1, 2, 0)
    cases.settle(ops.device)

    def run(at_once: bool) -> list[torch.Tensor]:
        given.query = ops.linear(x, up).view(tokens, 8, 192)
        cache = torch.zeros_like(given.cache)
        make = given.at_once if at_once else given.one_by_one
        return [ops.per_head(make(ops, cache), down), cache]

    check_replays(lambda: run(True), lambda: run(False), [x, given.kv])
