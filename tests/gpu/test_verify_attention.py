"""verify_attention.cu on a GPU against float64, over awkward batches, masks, lengths and grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.attention_rows import AttentionRows
from kdray.kernels.attention_table import AttentionPlan
from kdray.kernels.cuda_attention import CudaAttention
from kdray.kernels.loader import KernelLoader
from tests.kernels.attention_cases import (
    BUSHY,
    CHAIN,
    STAR,
    Case,
    Part,
    difference,
    expected,
    make_case,
    quantised_case,
    seen,
    slots,
)

pytestmark = pytest.mark.gpu

KIMI, DEMO = (512, 64), (64, 16)
SCALE = {KIMI: 0.08, DEMO: 0.3}
BOUND = {torch.bfloat16: 2.0**-7, torch.float32: 2e-5}
DTYPES = (torch.bfloat16, torch.float32)
# Rows in fp8 against an exact cache, at scores as flat as a model's (see test_fp8_..).
FORMAT_BOUND = 2.0**-4

BATCHES: dict[str, list[Part]] = {
    "one key": [Part(0)],
    "a tree without context": [Part(0, nodes=9)],
    "one node": [Part(8191)],
    "a step's end": [Part(15, nodes=1), Part(16, nodes=1), Part(17, nodes=1), Part(31, nodes=2)],
    "half a page": [Part(96, nodes=9), Part(33, nodes=17)],
    "9 nodes": [Part(1000 + 7 * i, nodes=9) for i in range(8)],
    "17 nodes": [Part(300 * i, nodes=17, shape=CHAIN) for i in range(4)],
    "33 nodes": [Part(2048, nodes=33), Part(777, nodes=33, shape=STAR)],
    "65 nodes": [Part(4095, nodes=65)],
    "8, 16, 32, 64 nodes": [Part(513, nodes=n) for n in (8, 16, 32, 64)],
    "all sizes": [Part(61 * n, nodes=n) for n in range(1, 34)],
    "nothing beside much": [Part(0), Part(20000, nodes=9), Part(0, nodes=3)],
    "known rows": [Part(0, known=200), Part(500, known=37, nodes=9), Part(64, known=64)],
    "inactive": [Part(70, known=0, padding=5), Part(400, nodes=9), Part(3, known=0)],
    "padding": [Part(100 * i, nodes=1 + i, padding=8 - i) for i in range(8)],
    "many": [Part(i * 7 % 400, nodes=1 + i % 9) for i in range(256)],
}


def on_gpu(case: Case) -> Case:
    return replace(case, query=case.query.cuda(), cache=case.cache.cuda())


def attend(attention: CudaAttention, case: Case, rows: AttentionRows, scale: float) -> Tensor:
    return attend_over(attention, case, case.cache, rows, scale)


def attend_over(
    attention: CudaAttention, case: Case, cache: Tensor, rows: AttentionRows, scale: float
) -> Tensor:
    latent = 512 if case.query.shape[2] == 576 else 64
    out = torch.full((*case.query.shape[:2], latent), torch.nan, device="cuda")
    out = out.to(case.query.dtype)
    schedule = attention.schedule(rows, case.query.dtype, case.query.shape[1])
    attention.attend(out, case.query, cache, rows, schedule, scale)
    return out


def fp8_difference(
    attention: CudaAttention, parts: Sequence[Part], dims: tuple[int, int] = KIMI, **wishes: object
) -> float:
    """Of the kernel over rows in fp8 from float64 over what they stand for."""
    case = make(parts, torch.bfloat16, dims=dims, **wishes)  # type: ignore[arg-type]
    stored = quantised_case(case, dims[0])
    out = attend_over(attention, stored.case, stored.rows, case.rows("cuda"), SCALE[dims])
    return difference(out, expected(stored.case, SCALE[dims], dims[0]))


def make(
    parts: Sequence[Part],
    dtype: torch.dtype,
    *,
    dims: tuple[int, int] = KIMI,
    heads: int = 8,
    page_size: int = 64,
    size: float = 1.0,
    seed: int = 0,
) -> Case:
    latent, rope = dims
    case = make_case(
        parts, heads=heads, latent=latent, rope=rope, page_size=page_size, dtype=dtype,
        seed=seed, size=size,
    )  # fmt: skip
    return on_gpu(case)


@pytest.fixture(scope="module")
def attention(loader: KernelLoader) -> CudaAttention:
    return CudaAttention(loader)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dims", "heads"), [(KIMI, 8), (KIMI, 64), (DEMO, 8), (DEMO, 3)], ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_awkward_batches(
    attention: CudaAttention, name: str, dims: tuple[int, int], heads: int, dtype: torch.dtype
) -> None:
    case = make(BATCHES[name], dtype, dims=dims, heads=heads)
    out = attend(attention, case, case.rows("cuda"), SCALE[dims])
    assert difference(out, expected(case, SCALE[dims], dims[0])) < BOUND[dtype]


@pytest.mark.parametrize(("dims", "heads"), [(KIMI, 8), (KIMI, 64), (DEMO, 8), (DEMO, 3)], ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_fp8_awkward_batches(
    attention: CudaAttention, name: str, dims: tuple[int, int], heads: int
) -> None:
    off = fp8_difference(attention, BATCHES[name], dims, heads=heads)
    assert off < BOUND[torch.bfloat16]


@pytest.mark.parametrize("page_size", [1, 2, 16, 32, 128])
def test_fp8_page_sizes(attention: CudaAttention, page_size: int) -> None:
    for dims in (KIMI, DEMO):
        parts = [Part(700, nodes=9), Part(33, nodes=2)]
        assert fp8_difference(attention, parts, dims, page_size=page_size) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 31, 66, 131])
def test_fp8_any_grid(loader: KernelLoader, blocks: int) -> None:
    parts = [Part(5000, nodes=33), Part(0), Part(900, nodes=9), Part(64, nodes=2)]
    for least in (1, 1000):
        chosen = CudaAttention(loader, plan=AttentionPlan(blocks, least))
        assert fp8_difference(chosen, parts) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("size", [0.0, 4.0, 20.0])
def test_fp8_flat_and_peaky_scores(attention: CudaAttention, size: float) -> None:
    parts = [Part(3000, nodes=9), Part(700, nodes=17)]
    assert fp8_difference(attention, parts, size=size) < BOUND[torch.bfloat16]


def test_fp8_nothing_beside_128k(attention: CudaAttention) -> None:
    parts = [Part(0), Part(131072 - 9, nodes=9), Part(0, nodes=3)]
    assert fp8_difference(attention, parts) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("dims", [KIMI, DEMO], ids=str)
def test_fp8_says_nearly_what_an_exact_cache_says(
    attention: CudaAttention, dims: tuple[int, int]
) -> None:
    """Scores some 0.5 apart, whose errors are a part of what the values' own are."""
    case = make([Part(3000, nodes=9)], torch.bfloat16, dims=dims, size=0.25)
    stored, rows = quantised_case(case, dims[0]), case.rows("cuda")
    out = attend_over(attention, case, stored.rows, rows, SCALE[dims])
    assert 2.0**-8 < difference(out, expected(case, SCALE[dims], dims[0])) < FORMAT_BOUND


def test_fp8_is_the_same_every_time(attention: CudaAttention) -> None:
    for name in ("nothing beside much", "33 nodes", "many"):
        case = make(BATCHES[name], torch.bfloat16)
        rows, cache = case.rows("cuda"), quantised_case(case, 512).rows
        first = attend_over(attention, case, cache, rows, SCALE[KIMI])
        for _ in range(20):
            assert torch.equal(attend_over(attention, case, cache, rows, SCALE[KIMI]), first)


def test_nothing_beside_128k(attention: CudaAttention) -> None:
    case = make([Part(0), Part(131072 - 9, nodes=9), Part(0, nodes=3)], torch.bfloat16)
    out = attend(attention, case, case.rows("cuda"), SCALE[KIMI])
    assert difference(out, expected(case, SCALE[KIMI], 512)) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 16, 32, 128])
def test_page_sizes(attention: CudaAttention, page_size: int, dtype: torch.dtype) -> None:
    for dims in (KIMI, DEMO):
        case = make([Part(700, nodes=9), Part(33, nodes=2)], dtype, dims=dims, page_size=page_size)
        out = attend(attention, case, case.rows("cuda"), SCALE[dims])
        assert difference(out, expected(case, SCALE[dims], dims[0])) < BOUND[dtype]


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 31, 66, 131])
@pytest.mark.parametrize("least", [1, 60, 1000])
def test_any_grid(loader: KernelLoader, blocks: int, least: int) -> None:
    parts = [Part(5000, nodes=33), Part(0), Part(900, nodes=9), Part(64, nodes=2)]
    for dtype in DTYPES:
        case = make(parts, dtype)
        chosen = CudaAttention(loader, plan=AttentionPlan(blocks, least))
        out = attend(chosen, case, case.rows("cuda"), SCALE[KIMI])
        assert difference(out, expected(case, SCALE[KIMI], 512)) < BOUND[dtype]


@pytest.mark.parametrize("size", [0.0, 4.0, 20.0])
def test_flat_and_peaky_scores(attention: CudaAttention, size: float) -> None:
    for dtype in DTYPES:
        case = make([Part(3000, nodes=9), Part(700, nodes=17)], dtype, size=size)
        out = attend(attention, case, case.rows("cuda"), SCALE[KIMI])
        assert difference(out, expected(case, SCALE[KIMI], 512)) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [CHAIN, STAR, BUSHY])
def test_a_node_sees_its_ancestors_and_itself(
    attention: CudaAttention, shape: str, dtype: torch.dtype
) -> None:
    """Another key for a draft changes the rows that have its bit, and not a bit of the others."""
    part = Part(130, nodes=41, shape=shape)
    case = make([part], dtype)
    rows = case.rows("cuda")
    before = attend(attention, case, rows, SCALE[KIMI])
    sees, place = seen(part), slots(case.batch, 0, part.cached + part.rows)
    for node in range(1, part.nodes):
        cache = case.cache.clone()
        cache[place[part.cached + node]] += 1
        after = attend(attention, replace(case, cache=cache), rows, SCALE[KIMI])
        changed = (after != before).any(-1).cpu().numpy()  # [T, H]
        wanted = sees[:, part.cached + node]
        assert np.array_equal(changed.any(1), wanted)
        if dtype == torch.float32:  # in bf16 rounding may hide the change from a head
            assert np.array_equal(changed.all(1), wanted)


def test_the_result_is_the_same_every_time(attention: CudaAttention) -> None:
    for name in ("nothing beside much", "33 nodes", "many"):
        for dtype in DTYPES:
            case = make(BATCHES[name], dtype)
            rows = case.rows("cuda")
            first = attend(attention, case, rows, SCALE[KIMI])
            for _ in range(20):
                assert torch.equal(attend(attention, case, rows, SCALE[KIMI]), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_replays_on_new_lengths(attention: CudaAttention, dtype: torch.dtype) -> None:
    """Lengths, trees, tables and numbers are read at replay; padding takes up what is not used."""
    requests, nodes, pages = 6, 17, 70
    rng = np.random.default_rng(3)
    steps = [
        make(
            [
                Part(int(rng.integers(0, 4000)), int(rng.integers(0, 2)), n, padding=nodes - n)
                if r % 3
                else Part(int(rng.integers(0, 60)), 1, n, padding=nodes - n)
                for r, n in enumerate(rng.integers(1, nodes + 1, requests).tolist())
            ],
            dtype,
            seed=step,
        )
        for step in range(5)
    ]
    cache = torch.zeros(400 * 64, 576, dtype=dtype, device="cuda")
    query = torch.zeros(requests * nodes, 8, 576, dtype=dtype, device="cuda")
    out = torch.empty(requests * nodes, 8, 512, dtype=dtype, device="cuda")
    held = holder(requests, nodes, pages)

    def run() -> None:
        schedule = attention.schedule(held, dtype, 8)
        attention.attend(out, query, cache, held, schedule, SCALE[KIMI])

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in steps:
        fill(held, case)
        cache[: len(case.cache)] = case.cache
        query[: case.num_rows] = case.query
        out.fill_(torch.nan)
        graph.replay()
        wanted = expected(case, SCALE[KIMI], 512)
        assert difference(out[: case.num_rows], wanted) < BOUND[dtype]


def holder(requests: int, nodes: int, pages: int) -> AttentionRows:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="cuda")

    return AttentionRows(
        row_start=zeros(requests + 1),
        num_cached=zeros(requests),
        num_known=zeros(requests),
        num_nodes=zeros(requests),
        page_table=zeros(requests, pages),
        page_size=64,
        mask=zeros(requests, nodes, 1),
        rows_cap=nodes,
    )


def fill(held: AttentionRows, case: Case) -> None:
    new = case.rows("cuda")
    for field in fields(AttentionRows):
        to, value = getattr(held, field.name), getattr(new, field.name)
        if isinstance(to, Tensor):
            to.zero_()
            to[tuple(slice(0, n) for n in value.shape)] = value


def test_nothing_beyond_the_outputs_is_written(attention: CudaAttention) -> None:
    case = make([Part(100, nodes=9), Part(5000, nodes=2, padding=3)], torch.bfloat16)
    fence = torch.full((case.num_rows + 2, 8, 512), -7.0, device="cuda").bfloat16()
    rows = case.rows("cuda")
    schedule = attention.schedule(rows, torch.bfloat16, 8)
    attention.attend(fence[1:-1], case.query, case.cache, rows, schedule, SCALE[KIMI])
    assert (fence[0] == -7).all() and (fence[-1] == -7).all()
    assert difference(fence[1:-1], expected(case, SCALE[KIMI], 512)) < BOUND[torch.bfloat16]


def test_a_batch_of_the_host_gives_the_same(attention: CudaAttention) -> None:
    for dtype in DTYPES:
        case = make([Part(100, nodes=9), Part(50, known=7, nodes=4)], dtype)
        batch = replace(
            case.batch, page_table=case.batch.page_table.cuda(), mask=case.batch.mask.cuda()
        )
        found = attention.verify_attention(case.query, case.cache, batch, SCALE[KIMI], 512)
        assert torch.equal(found, attend(attention, case, case.rows("cuda"), SCALE[KIMI]))


def test_what_the_kernel_does_not_take_is_refused(attention: CudaAttention) -> None:
    case = make([Part(100, nodes=2)], torch.bfloat16)
    rows = case.rows("cuda")
    schedule = attention.schedule(rows, torch.bfloat16, 8)
    out = torch.empty(2, 8, 512, device="cuda").bfloat16()
    with pytest.raises(KernelError, match="power of two"):
        attention.attend(out, case.query, case.cache, replace(rows, page_size=48), schedule, 1.0)
    with pytest.raises(KernelError, match="bfloat16 or float32"):
        attention.attend(out.half(), case.query.half(), case.cache.half(), rows, schedule, 1.0)
