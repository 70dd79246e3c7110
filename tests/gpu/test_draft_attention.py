"""draft_attention.cu on a GPU against float64, over awkward lengths, heads, rules and cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.cuda import CudaOps
from kdray.kernels.cuda_draft import CudaDraftAttention, DraftPlan
from kdray.kernels.loader import KernelLoader
from tests.kernels.attention_cases import difference
from tests.kernels.draft_cases import DEMO, KIMI, RULES, Case, Heads, expected, make_case

pytestmark = pytest.mark.gpu

BOUND = {torch.bfloat16: 2.0**-7, torch.float32: 2e-5}
DTYPES = (torch.bfloat16, torch.float32)
HEADS = [
    KIMI,
    DEMO,
    Heads(slots=1, heads=1, groups=1, dim=64),
    Heads(slots=5, heads=6, groups=2, dim=128),
    Heads(slots=16, heads=16, groups=4, dim=128),
    Heads(slots=15, heads=14, groups=2, dim=64),
    Heads(slots=16, heads=16, groups=2, dim=128),
]
BATCHES: dict[str, list[int]] = {
    "no context": [0],
    "no context at all": [0] * 70,
    "one token": [1],
    "side by side": [0, 1, 10, 4000],
    "a step's end": [55, 56, 57, 63, 64, 65, 119, 120, 121],
    "one long": [20000],
    "one long among many": [10] * 40 + [9000] + [0] * 40,
    "all lengths": list(range(0, 2000, 61)),
    "even": [1024] * 16,
    "many": [i * 7 % 400 for i in range(256)],
}


def attend(attention: CudaDraftAttention, case: Case) -> Tensor:
    return attention.draft_attention(case.query, case.own, case.cache, case.batch, case.scale)


def make(ends: Sequence[int], heads: Heads, dtype: torch.dtype, **wishes: object) -> Case:
    return make_case(ends, heads, dtype=dtype, **wishes).to("cuda")  # type: ignore[arg-type]


def check(attention: CudaDraftAttention, case: Case) -> None:
    assert difference(attend(attention, case), expected(case)) < BOUND[case.query.dtype]


@pytest.fixture(scope="module")
def attention(loader: KernelLoader) -> CudaDraftAttention:
    return CudaDraftAttention(loader)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_awkward_batches(
    attention: CudaDraftAttention, name: str, heads: Heads, dtype: torch.dtype
) -> None:
    check(attention, make(BATCHES[name], heads, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_of_sight(attention: CudaDraftAttention, rule: str, dtype: torch.dtype) -> None:
    for heads in (KIMI, DEMO):
        check(attention, make([0, 2, 4, 61, 66, 69, 133, 5000], heads, dtype, rule=rule))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 32, 64, 128])
def test_page_sizes(attention: CudaDraftAttention, page_size: int, dtype: torch.dtype) -> None:
    check(attention, make([700, 33], KIMI, dtype, page_size=page_size))


@pytest.mark.parametrize("pieces", [1, 2, 7, 31, 66, 300])
@pytest.mark.parametrize("least", [1, 5, 100])
def test_any_cut(loader: KernelLoader, pieces: int, least: int) -> None:
    cut = CudaDraftAttention(loader, plan=DraftPlan(pieces, least))
    for dtype in DTYPES:
        check(cut, make([5000, 0, 900, 64], KIMI, dtype))


@pytest.mark.parametrize("size", [0.0, 4.0, 20.0])
def test_flat_and_peaky_scores(attention: CudaDraftAttention, size: float) -> None:
    """A score of size² * 8, of which float32 keeps 24 bits, stands in an exponent."""
    for dtype in DTYPES:
        case = make([3000, 700], KIMI, dtype, size=size)
        bound = max(BOUND[dtype], size**2 * 8 * 2.0**-24)
        assert difference(attend(attention, case), expected(case)) < bound


def test_the_result_is_the_same_every_time(attention: CudaDraftAttention) -> None:
    for name in ("side by side", "one long among many", "all lengths"):
        for dtype in DTYPES:
            case = make(BATCHES[name], KIMI, dtype)
            first = attend(attention, case)
            for _ in range(20):
                assert torch.equal(attend(attention, case), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_replays_on_new_lengths(attention: CudaDraftAttention, dtype: torch.dtype) -> None:
    """Lengths, tables and numbers are read at replay; rows of padding have no context."""
    requests, pages = 9, 260
    rng = np.random.default_rng(3)
    held = blank(requests, pages, KIMI, dtype)
    attend(attention, held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(attention, held)
    for step in range(6):
        ends = rng.integers(0, 4000, requests) * rng.integers(0, 2, requests)
        case = make(ends.tolist(), KIMI, dtype, seed=step)
        fill(held, case)
        out.fill_(torch.nan)
        graph.replay()
        assert difference(out, expected(case)) < BOUND[dtype]


def blank(requests: int, pages: int, heads: Heads, dtype: torch.dtype) -> Case:
    """Buffers for any batch, of rows of padding alone."""
    case = make([0] * requests, heads, dtype)
    kv = (2, heads.groups, heads.dim)
    table = torch.zeros(requests, pages, dtype=torch.int32, device="cuda")
    cache = torch.full((3000 * 16, *kv), torch.nan, dtype=dtype, device="cuda")
    return replace(case, cache=cache, batch=replace(case.batch, page_table=table))


def fill(held: Case, case: Case) -> None:
    held.query.copy_(case.query)
    held.own.copy_(case.own)
    held.cache[: len(case.cache)] = case.cache
    held.batch.end.copy_(case.batch.end)
    table = case.batch.page_table
    held.batch.page_table[:, : table.shape[1]] = table


def test_queries_with_strides_of_their_own(attention: CudaDraftAttention) -> None:
    for dtype in DTYPES:
        case = make([300, 0, 80], KIMI, dtype)
        wide = torch.full((3, 9, 40, 128), torch.nan, dtype=dtype, device="cuda")
        wide[:, :8, :32] = case.query
        strided = replace(case, query=wide[:, :8, :32])
        assert torch.equal(attend(attention, strided), attend(attention, case))


@pytest.mark.parametrize("heads", [KIMI, Heads(slots=5, heads=4, groups=2, dim=16)], ids=str)
def test_ops_serve_every_shape(loader: KernelLoader, heads: Heads) -> None:
    """By the kernel or, where it does not take it, by the reference."""
    ops = CudaOps(loader.device, loader)
    for dtype in DTYPES:
        for rule in RULES:
            case = make([0, 1, 10, 300], heads, dtype, rule=rule)
            found = ops.draft_attention(case.query, case.own, case.cache, case.batch, case.scale)
            assert difference(found, expected(case)) < 2 * BOUND[dtype]


def test_what_the_kernel_does_not_take_is_refused(attention: CudaDraftAttention) -> None:
    case = make([100], KIMI, torch.bfloat16)
    with pytest.raises(KernelError, match="power of two"):
        attend(attention, replace(case, batch=replace(case.batch, page_size=48)))
    with pytest.raises(KernelError, match="bfloat16 or float32"):
        half = (case.query.half(), case.own.half(), case.cache.half())
        attend(attention, Case(*half, case.batch))
