"""verify_attention.cu's own source, thread by thread on the CPU, against float64.

Matrix products are emulated from the documented fragments; all else is the kernel's own text.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kdray.kernels.attention_batch import DeviceAttentionBatch
from kdray.kernels.attention_rows import AttentionRows
from kdray.kernels.attention_table import SHAPES, AttentionPlan
from kdray.kernels.cuda_attention import CudaAttention
from kdray.kernels.cuda_plan import tile_sizes
from kdray.kernels.reference import ReferenceOps
from kdray.kernels.reference_plan import PIECE_FIELDS, PlanCosts, plan_attention
from tests.kernels.attention_cases import (
    CHAIN,
    STAR,
    Case,
    Part,
    difference,
    expected,
    make_case,
    quantised_case,
)
from tests.kernels.simt_loader import simt_loader

SCALE = 0.3
# Relative, of a row: weights in bf16, half a unit of 8 bits each, and one more rounding at the end.
BOUND = {torch.bfloat16: 2.0**-7, torch.float32: 2e-5}
# Rows in fp8 against an exact cache: latents are off by 2^-5 on the average, and so are values and
# scores, which are about 0.7 apart here.
FORMAT_BOUND = 2.0**-4
DTYPES = (torch.bfloat16, torch.float32)
# By what the cache holds: what the queries are in.
KINDS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": torch.bfloat16}


def attend(
    case: Case,
    latent: int,
    *,
    blocks: int = 1,
    least: int = 1,
    seed: int = 0,
    cache: Tensor | None = None,
) -> Tensor:
    """cache: instead of the case's."""
    attention = CudaAttention(simt_loader(seed), plan=AttentionPlan(blocks, least))
    out = torch.full((*case.query.shape[:2], latent), torch.nan, dtype=case.query.dtype)
    rows = case.rows()
    schedule = attention.schedule(rows, case.query.dtype, case.query.shape[1])
    held = case.cache if cache is None else cache
    attention.attend(out, case.query, held, rows, schedule, SCALE)
    return out


def check(
    parts: Sequence[Part],
    kind: str = "bfloat16",
    *,
    heads: int = 8,
    latent: int = 64,
    rope: int = 16,
    page_size: int = 16,
    blocks: int = 1,
    size: float = 1.0,
    seed: int = 0,
) -> None:
    dtype, cache = KINDS[kind], None
    case = make_case(
        parts, heads=heads, latent=latent, rope=rope, page_size=page_size, dtype=dtype, size=size
    )
    if kind == "fp8":
        stored = quantised_case(case, latent)
        case, cache = stored.case, stored.rows
    out = attend(case, latent, blocks=blocks, seed=seed, cache=cache)
    assert difference(out, expected(case, SCALE, latent)) < BOUND[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 8, 9, 10, 17, 33, 65])
def test_trees_of_every_size(nodes: int, kind: str) -> None:
    check([Part(cached=37, nodes=nodes)], kind, blocks=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", [0, 1, 14, 15, 16, 17, 31, 47, 100])
def test_contexts_that_end_anywhere(cached: int, kind: str) -> None:
    check([Part(cached, nodes=3), Part(cached, nodes=9, shape=CHAIN)], kind, heads=3)


@pytest.mark.parametrize("page_size", [1, 2, 16, 32, 64])
def test_page_sizes(page_size: int) -> None:
    for kind in KINDS:
        check([Part(70, nodes=9), Part(33, nodes=2)], kind, page_size=page_size, blocks=3)


@pytest.mark.parametrize("blocks", range(1, 8))
def test_any_grid(blocks: int) -> None:
    """Short beside long, so that blocks share the long one's tiles."""
    for kind in KINDS:
        check([Part(0), Part(400, nodes=9), Part(3, nodes=2)], kind, blocks=blocks, seed=blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_known_rows_padding_and_requests_that_take_no_part(kind: str) -> None:
    parts = [
        Part(0, known=0, padding=3),
        Part(20, known=18),
        Part(5, known=4, nodes=7, padding=2),
        Part(90, known=0),
        Part(0, known=33, nodes=2),
    ]
    check(parts, kind, heads=3, blocks=4)


def test_a_mask_of_several_words() -> None:
    check([Part(10, nodes=70, shape=STAR), Part(0, nodes=40)], heads=2, blocks=3)


@pytest.mark.parametrize("size", [0.0, 6.0, 30.0])
def test_flat_and_peaky_scores(size: float) -> None:
    """Large scores make maxima grow along the keys, so that sums are rescaled."""
    for kind in ("bfloat16", "fp8"):
        check([Part(150, nodes=9), Part(40)], kind, blocks=2, size=size)


@pytest.mark.parametrize(("latent", "rope"), [(128, 32), (512, 64)])
def test_other_dimensions(latent: int, rope: int) -> None:
    for kind in ("bfloat16", "fp8"):
        check([Part(60, nodes=9), Part(0)], kind, latent=latent, rope=rope, blocks=3)
    check([Part(30, nodes=2)], "float32", latent=latent, rope=rope, blocks=2)


def test_many_requests_and_no_work_for_most_blocks() -> None:
    parts = [Part(i % 5, known=i % 3) for i in range(300)]
    check(parts, "float32", heads=1, blocks=7)


def test_fp8_of_rows_of_every_size() -> None:
    """Scales of all sizes beside one another: weights in float16 of many powers of two."""
    parts = [Part(50, nodes=9), Part(20)]
    case = make_case(parts, heads=2, latent=64, rope=16, page_size=16, dtype=torch.bfloat16)
    size = torch.logspace(-12, 1.5, len(case.cache))[:, None]
    stored = quantised_case(replace(case, cache=(case.cache * size).bfloat16()), 64)
    out = attend(stored.case, 64, blocks=2, cache=stored.rows)
    assert difference(out, expected(stored.case, SCALE, 64)) < BOUND[torch.bfloat16]


def test_fp8_of_queries_beyond_float16() -> None:
    """The too large count as the largest, the tiny as nothing, and no number stays none."""
    case = make_case(
        [Part(50, nodes=9)], heads=2, latent=64, rope=16, page_size=16, dtype=torch.bfloat16
    )
    stored = quantised_case(case, 64)
    query = case.query.clone()
    query[0, 0, :64], query[1, 1, :64], query[2, :, :64] = 1e30, 1e-20, 60000
    query[3, 0, 5] = torch.nan
    out = attend(replace(stored.case, query=query), 64, blocks=2, cache=stored.rows)
    latent = query[..., :64].float().clamp(-65504, 65504)
    meant = torch.cat([latent, query[..., 64:].float()], -1)
    wanted = expected(replace(stored.case, query=meant), SCALE, 64)
    broken = torch.zeros(query.shape[:2], dtype=torch.bool)
    broken[3, 0] = True
    assert out[broken].isnan().all()
    assert difference(out[~broken], wanted[~broken]) < BOUND[torch.bfloat16]


def test_fp8_says_nearly_what_an_exact_cache_says() -> None:
    case = make_case(
        [Part(300, nodes=9)], heads=8, latent=64, rope=16, page_size=16, dtype=torch.bfloat16,
        size=0.3,
    )  # fmt: skip
    out = attend(case, 64, blocks=2, cache=quantised_case(case, 64).rows)
    assert 2.0**-8 < difference(out, expected(case, SCALE, 64)) < FORMAT_BOUND


def test_queries_with_strides_of_their_own() -> None:
    case = make_case(
        [Part(30, nodes=4)], heads=3, latent=64, rope=16, page_size=16, dtype=torch.bfloat16
    )
    wide = torch.full((4, 5, 96), torch.nan, dtype=torch.bfloat16)
    wide[:, 1:4, 8:88] = case.query
    moved = Case(wide[:, 1:4, 8:88], case.cache, case.batch, case.parts)
    assert torch.equal(attend(moved, 64, blocks=2), attend(case, 64, blocks=2))


def test_the_order_of_threads_does_not_show() -> None:
    parts = [Part(100, nodes=9), Part(7, nodes=12)]
    case = make_case(parts, heads=8, latent=64, rope=16, page_size=16, dtype=torch.bfloat16)
    for cache in (case.cache, quantised_case(case, 64).rows):
        first = attend(case, 64, blocks=4, seed=0, cache=cache)
        for seed in range(1, 5):
            assert torch.equal(attend(case, 64, blocks=4, seed=seed, cache=cache), first)


def test_tickets_are_ready_for_the_next_launch() -> None:
    case = make_case(
        [Part(200, nodes=9)], heads=8, latent=64, rope=16, page_size=16, dtype=torch.bfloat16
    )
    attention = CudaAttention(simt_loader(), plan=AttentionPlan(5, 11))
    first, second = (
        attention.verify_attention(case.query, case.cache, case.batch, SCALE, 64) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_a_batch_of_the_device_equals_the_reference() -> None:
    parts = [Part(20, nodes=5, padding=4), Part(3, nodes=9), Part(33, nodes=1, padding=8)]
    case = make_case(parts, heads=2, latent=64, rope=16, page_size=16, dtype=torch.float32)
    batch = DeviceAttentionBatch(
        num_cached=torch.tensor([20, 3, 33], dtype=torch.int32),
        num_nodes=torch.tensor([5, 9, 1], dtype=torch.int32),
        page_table=case.batch.page_table.clamp_min(0),
        page_size=16,
        mask=case.batch.mask,
    )
    cache = case.cache.nan_to_num(0.0)  # the reference reads every page
    args = (case.query, cache, batch, SCALE, 64)
    found = CudaAttention(simt_loader(), plan=AttentionPlan(2, 1)).verify_attention(*args)
    wanted = ReferenceOps(torch.device("cpu")).verify_attention(*args)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("behind", ["nobody", "the last"])
def test_planned_rows_of_the_device_equal_the_reference(behind: str) -> None:
    """Known tokens, with trees behind some, a request without rows, and padding: of a request that
    has no other rows, or behind the last one's."""
    padding = 9 if behind == "the last" else 0
    parts = [Part(20, known=5), Part(0, known=33, nodes=6), Part(7, known=0)]
    parts += [Part(40, known=1, nodes=9, padding=padding)]
    parts += [Part(9, known=0, padding=11)] if behind == "nobody" else []
    case = make_case(parts, heads=2, latent=64, rope=16, page_size=16, dtype=torch.float32)
    rows = case.rows()
    batch = AttentionRows(
        row_start=rows.row_start,
        num_cached=rows.num_cached,
        num_known=rows.num_known,
        num_nodes=rows.num_nodes,
        page_table=rows.page_table.clamp_min(0),
        page_size=16,
        mask=rows.mask,
        rows_cap=case.num_rows,
    )
    args = (case.query, case.cache, batch, SCALE, 64)
    attention = CudaAttention(simt_loader(), plan=AttentionPlan(2, 1))
    found, again = (attention.verify_attention(*args) for _ in range(2))
    assert torch.equal(again, found)
    wanted = ReferenceOps(torch.device("cpu")).verify_attention(*args)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    del args, batch
    gc.collect()
    assert not attention._laid_out, "a batch that is gone holds nothing"
    assert not found[52:].any() and found[:52].any(dim=(1, 2)).all()


PLANS = {
    "nothing": [Part(0, known=0)],
    "one": [Part(5000, nodes=9)],
    "alike": [Part(900, nodes=9)] * 5,
    "long beside short": [Part(60000, nodes=9), *[Part(i) for i in range(40)]],
    "many": [Part(i * 37 % 3000, nodes=1 + i % 33) for i in range(70)],
    "known rows": [Part(0, known=300), Part(100, known=17, nodes=5), Part(7, known=0)],
    "middling": [Part(400 + 10 * i, nodes=17) for i in range(9)],
    "little": [Part(3, nodes=33), Part(40, nodes=9)],
    "little each": [Part(30 * i, nodes=2) for i in range(20)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [1, 3, 7, 132])
@pytest.mark.parametrize("name", PLANS)
def test_work_is_dealt_out_as_the_reference_deals_it(
    name: str, blocks: int, dtype: torch.dtype
) -> None:
    parts, heads, shape = PLANS[name], 8, SHAPES[dtype]
    pages = max(-(-(part.cached + part.rows) // 64) for part in parts) + 1
    case = make_case(
        [Part(0, part.known, part.nodes, part.shape) for part in parts],
        heads=1, latent=64, rope=16, page_size=64, dtype=dtype,
    )  # fmt: skip
    rows = replace(
        case.rows(),
        num_cached=torch.tensor([part.cached for part in parts], dtype=torch.int32),
        page_table=torch.zeros(len(parts), pages, dtype=torch.int32),
    )
    plan = AttentionPlan(blocks, 90)
    schedule = CudaAttention(simt_loader(), plan=plan).schedule(rows, dtype, heads)
    most = max(0, *(part.rows for part in parts)) * heads
    sizes = tile_sizes(plan, shape.tile_rows, blocks, len(parts), most)
    costs = PlanCosts(
        tile_rows=sizes.most,
        small_rows=sizes.small,
        small_cost=plan.small_cost,
        few_rows=sizes.few,
        few_cost=sizes.few_cost,
        twice_cost=plan.twice_cost,
        step=shape.step,
        step_cost=shape.step_cost,
        eight_cost=shape.eight_cost,
        setup_cost=shape.setup_cost,
        least=max(shape.lowest_share, plan.least_cost),
    )
    wanted, start = plan_attention(
        *(numbers.tolist() for numbers in rows.lengths), heads=heads, blocks=blocks, costs=costs
    )
    assert schedule.start.tolist() == start
    found = schedule.piece[: start[-1], : len(PIECE_FIELDS)].tolist()
    assert [dict(zip(PIECE_FIELDS, piece, strict=True)) for piece in found] == wanted
    check_cover(wanted, costs)


def test_little_work_has_a_block_for_every_eight_rows() -> None:
    shape = SHAPES[torch.bfloat16]
    plan = AttentionPlan(132, 90)
    sizes = tile_sizes(plan, shape.tile_rows, 132, 4, 9 * 8)
    costs = PlanCosts(
        tile_rows=sizes.most, small_rows=sizes.small, small_cost=plan.small_cost,
        few_rows=sizes.few, few_cost=sizes.few_cost, twice_cost=plan.twice_cost, step=shape.step,
        step_cost=shape.step_cost, eight_cost=shape.eight_cost, setup_cost=shape.setup_cost,
        least=plan.least_cost,
    )  # fmt: skip

    def rows_of_pieces(cached: int) -> set[int]:
        lengths = [0, 9, 18, 27, 36], [cached] * 4, [1] * 4, [9] * 4
        pieces, _ = plan_attention(*lengths, heads=8, blocks=132, costs=costs)
        assert len({piece["block"] for piece in pieces}) == len(pieces)
        return {piece["rows"] for piece in pieces}

    assert rows_of_pieces(200) == {8}
    assert rows_of_pieces(1000) == {8, 16}
    assert rows_of_pieces(3000) == {32, 40}
    assert rows_of_pieces(9000) == {72}


def check_cover(pieces: Sequence[dict[str, int]], costs: PlanCosts) -> None:
    """Every step of every tile is in exactly one piece; a tile has neighbouring blocks."""
    tiles: dict[tuple[int, int], list[dict[str, int]]] = {}
    for piece in pieces:
        tiles.setdefault((piece["request"], piece["first"]), []).append(piece)
    for of_tile in tiles.values():
        steps = -(-of_tile[0]["keys"] // costs.step)
        assert [piece["begin"] for piece in of_tile] == [0, *(p["end"] for p in of_tile[:-1])]
        assert of_tile[-1]["end"] == steps and all(p["begin"] < p["end"] for p in of_tile)
        first = of_tile[0]["block"]
        assert [p["block"] for p in of_tile] == [first + i for i in range(len(of_tile))]
        assert {p["count"] for p in of_tile} == {len(of_tile)}
