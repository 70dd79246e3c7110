"""verify_attention_invariant.cu's own source on the CPU: against float64, and against itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.cuda_invariant import (
    FIRST_SEGMENT,
    GROUP,
    LAUNCH_ITEMS,
    CudaInvariantAttention,
    items_of,
    shared_bytes,
    takes,
)
from kdray.kernels.loader import MAX_BLOCK_BYTES
from tests.kernels.attention_cases import (
    CHAIN,
    STAR,
    Case,
    Part,
    difference,
    every_row_alone,
    expected,
    make_case,
    real_rows,
)
from tests.kernels.simt_loader import simt_loader

SCALE = 0.3
BOUND = 2.0**-7  # as verify_attention in bf16


def make(parts: Sequence[Part], *, heads: int = 8, page_size: int = 16, size: float = 1.0) -> Case:
    return make_case(
        parts, heads=heads, latent=64, rope=16, page_size=page_size, dtype=torch.bfloat16,
        size=size,
    )  # fmt: skip


def attend(case: Case, *, seed: int = 0) -> Tensor:
    attention = CudaInvariantAttention(simt_loader(seed))
    out = torch.full((*case.query.shape[:2], 64), torch.nan, dtype=torch.bfloat16)
    rows = case.rows()
    attention.attend(out, case.query, case.cache, rows, attention.plan(rows, *out.shape[:2]), SCALE)
    return out


BATCHES = {
    "one key": [Part(0)],
    "a tree without context": [Part(0, nodes=9)],
    "ends of products": [Part(n, nodes=2) for n in (14, 15, 16, 17, 31)],
    "ends of chunks": [Part(n, nodes=3) for n in (29, 30, 31, 32)],
    "ends of segments": [Part(n, nodes=9) for n in (118, 122, 127, 128, 255)],
    "chains": [Part(250, nodes=17, shape=CHAIN), Part(100, nodes=9, shape=CHAIN)],
    "several words": [Part(240, nodes=70, shape=STAR), Part(0, nodes=40)],
    "known rows": [Part(0, known=300), Part(200, known=60, nodes=7), Part(5, known=4, nodes=7)],
    "padding": [Part(0, known=0, padding=3), Part(90, nodes=3, padding=2), Part(90, known=0)],
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_row_has_the_same_bits_by_itself(name: str) -> None:
    """In its tree, beside other rows and behind other pages, as plainly decoded: one row a request,
    its path in the cache in order."""
    case = make(BATCHES[name], heads=3 if name == "known rows" else 8)
    out, real = attend(case), real_rows(case)
    assert difference(out, expected(case, SCALE, 64)) < BOUND
    assert not out[~real].any(), "padding gives 0"
    if real.any():
        assert torch.equal(out[real], attend(every_row_alone(case, 64)))


@pytest.mark.parametrize("heads", [1, 8, 12, 20])
def test_heads_of_any_number(heads: int) -> None:
    case = make([Part(300, nodes=5), Part(30, nodes=2)], heads=heads)
    out = attend(case)
    assert difference(out, expected(case, SCALE, 64)) < BOUND
    assert torch.equal(out, attend(every_row_alone(case, 64)))


@pytest.mark.parametrize("page_size", [1, 64])
def test_page_sizes(page_size: int) -> None:
    case = make([Part(270, nodes=9), Part(33, nodes=2)], page_size=page_size)
    assert difference(attend(case), expected(case, SCALE, 64)) < BOUND


@pytest.mark.parametrize("size", [0.0, 6.0, 30.0])
def test_flat_and_peaky_scores(size: float) -> None:
    case = make([Part(600, nodes=5)], size=size)
    out = attend(case)
    assert difference(out, expected(case, SCALE, 64)) < BOUND
    assert torch.equal(out, attend(every_row_alone(case, 64)))


def test_segments_grow_where_there_would_be_too_many() -> None:
    """Rows on both sides of 8,192 keys, whose segments are of two lengths."""
    case = make([Part(8190, nodes=5, shape=CHAIN)], heads=1, page_size=64)
    attention = CudaInvariantAttention(simt_loader())
    info = attention.plan(case.rows(), 5, 1).info
    assert info[:, 2].tolist() == [8191, 8192, 8193, 8194, 8195]
    assert info[:, 3].tolist() == [0, 0, 1, 1, 1]
    out = attend(case)
    assert difference(out, expected(case, SCALE, 64)) < BOUND
    assert torch.equal(out, attend(every_row_alone(case, 64)))


@pytest.mark.parametrize("heads", [3, 20])
def test_every_segment_of_every_item_is_in_one_unit(heads: int) -> None:
    """Neighbours share one where it lies before all their own rows, or they are of one row."""
    parts = [Part(300, nodes=9), Part(0, known=40, padding=2), Part(700, nodes=17, shape=CHAIN)]
    case = make(parts, heads=heads)
    paths = CudaInvariantAttention(simt_loader()).plan(case.rows(), case.num_rows, heads)
    a_row = items_of(heads)
    keys = paths.info[:, 2].tolist()
    wanted = {
        (row * a_row + head, segment)
        for row, count in enumerate(keys)
        for head in range(a_row)
        for segment in range(-(-count // FIRST_SEGMENT))
    }
    found: list[tuple[int, int]] = []
    for launch, (count, *units) in enumerate(paths.unit.tolist()):
        for unit in units[:count]:
            first, size, segment = unit >> 16, unit >> 8 & 255, unit & 255
            own = [launch * LAUNCH_ITEMS + first + i for i in range(size)]
            found += [(item, segment) for item in own]
            assert size <= GROUP and first // GROUP == (first + size - 1) // GROUP
            rows = {item // a_row for item in own}
            request, limit = paths.info[sorted(rows), 0], paths.info[sorted(rows), 1]
            shared = (
                bool((request == request[0]).all()) and (segment + 1) * FIRST_SEGMENT <= limit.min()
            )
            assert len(rows) == 1 or shared
    assert len(found) == len(set(found)) and set(found) == wanted
    assert (
        max(unit >> 8 & 255 for unit in paths.unit[0, 1 : 1 + paths.unit[0, 0]].tolist()) == GROUP
    )


def test_more_rows_than_a_launch_takes() -> None:
    case = make([Part(0, known=LAUNCH_ITEMS - 3), Part(20, nodes=9)], heads=2)
    out = attend(case)
    assert difference(out, expected(case, SCALE, 64)) < BOUND
    assert torch.equal(out, attend(every_row_alone(case, 64)))


def test_the_order_of_threads_does_not_show() -> None:
    case = make([Part(290, nodes=9), Part(7, nodes=12)])
    first = attend(case)
    for seed in range(1, 4):
        assert torch.equal(attend(case, seed=seed), first)


def test_the_op_lays_out_a_batch_once() -> None:
    case = make([Part(290, nodes=9), Part(7, nodes=12)])
    attention = CudaInvariantAttention(simt_loader())
    first, second = (
        attention.verify_attention(case.query, case.cache, case.batch, SCALE, 64) for _ in range(2)
    )
    assert torch.equal(first, attend(case)) and torch.equal(first, second)
    assert len(attention._laid_out) == 1


def test_what_the_kernel_does_not_take_is_refused() -> None:
    case = make([Part(20)])
    attention = CudaInvariantAttention(simt_loader())
    with pytest.raises(KernelError, match="bfloat16"):
        attention.verify_attention(case.query.float(), case.cache, case.batch, SCALE, 64)
    assert not takes(case.query, case.cache, 48, 64)
    assert not takes(case.query[..., 1:], case.cache, 16, 64)
    assert shared_bytes(512, 64) <= MAX_BLOCK_BYTES < shared_bytes(1024, 128)
