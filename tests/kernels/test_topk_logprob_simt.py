"""topk_logprob.cu's own source, thread by thread on the CPU, against the reference and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kdray.kernels.cuda_topk import (
    COMPILED_K,
    MAX_KEYS,
    MAX_PIECE_KEYS,
    MAX_PIECES,
    MAX_SHARED_ROWS,
    SEGMENT,
    CudaTopk,
    deal_segments,
)
from tests.kernels.simt_loader import simt_loader
from tests.kernels.topk_cases import KINDS, assert_exact, logits_of


@pytest.fixture(scope="module")
def topk() -> CudaTopk:
    return CudaTopk(simt_loader())


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "seed"), [(torch.bfloat16, 1), (torch.float32, 2)], ids=str)
def test_every_kind_of_row(kind: str, dtype: torch.dtype, seed: int) -> None:
    topk = CudaTopk(simt_loader(seed))
    logits = logits_of(kind, 3, 3 * SEGMENT + 77, dtype)
    found = topk.topk_logprob(logits, 16)
    assert_exact(logits, 16, *found)
    for run in (1, 3, 5):  # of 4 segments a row, 12 in all
        assert same(topk.topk_logprob(logits, 16, run=run), found), f"{run} segments a block"


@pytest.mark.parametrize("vocab", [5, SEGMENT, SEGMENT + 1025, 5 * SEGMENT - 3])
def test_the_deal_never_shows(topk: CudaTopk, vocab: int) -> None:
    """Rows of several kinds side by side, so that a block goes from one kind to another."""
    rows = [logits_of(kind, 1, vocab, torch.bfloat16) for kind in ("band", "normal", "dead")]
    logits = torch.cat(rows * 2)
    for k in (5, 64):
        found = topk.topk_logprob(logits, k)
        assert_exact(logits, k, *found)
        for run in (2, 3, 7, 29):
            assert same(topk.topk_logprob(logits, k, run=run), found), f"{run} segments a block"


def test_a_shards_mass_does_not_depend_on_the_deal(topk: CudaTopk) -> None:
    logits = logits_of("holes", 3, 3 * SEGMENT - 50, torch.bfloat16)
    whole = topk.topk_partial(logits, 9, 1024, run=3)
    for run in (1, 2, 4, 5):
        part = topk.topk_partial(logits, 9, 1024, run=run)
        for name in ("value", "id", "mass"):
            assert torch.equal(getattr(part, name), getattr(whole, name)), f"{name}, {run=}"


def test_launches_leave_the_workspace_as_they_found_it(topk: CudaTopk) -> None:
    logits = logits_of("normal", 3, 2 * SEGMENT, torch.bfloat16)
    for run in (1, 3):
        topk.topk_logprob(logits, 4, run=run)
        assert not topk._ticket.any()


@given(
    rows=st.integers(1, 3000),
    segments=st.integers(1, 32),
    keys=st.sampled_from(COMPILED_K),
    processors=st.integers(1, 200),
    run=st.none() | st.integers(1, 100),
)
def test_a_deal_keeps_the_kernels_limits(
    rows: int, segments: int, keys: int, processors: int, run: int | None
) -> None:
    deal = deal_segments(rows, segments, keys, processors, run)
    assert deal.pitch >= segments
    assert (deal.blocks - 1) * deal.run < rows * deal.pitch <= deal.blocks * deal.run
    starts = np.arange(rows) * deal.pitch
    pieces = (starts + segments - 1) // deal.run - starts // deal.run + 1
    assert pieces.max() <= MAX_PIECES and pieces.max() * keys <= MAX_PIECE_KEYS
    if pieces.max() > 1:
        assert rows <= MAX_SHARED_ROWS and (rows + deal.blocks) * keys <= MAX_KEYS
    if run is None:
        assert deal.pitch % deal.run == 0  # no block works on two rows
        assert deal.blocks <= max(rows, 4.25 * processors)


@pytest.mark.parametrize("k", [1, 5, 8, 32, 33, 64])
def test_every_k(topk: CudaTopk, k: int) -> None:
    for kind in ("normal", "band", "rising"):
        logits = logits_of(kind, 2, 2 * SEGMENT - 1, torch.bfloat16)
        assert_exact(logits, k, *topk.topk_logprob(logits, k))


@pytest.mark.parametrize("vocab", [1, 3, 31, 1023, 1024, 1025, SEGMENT, SEGMENT + 1])
def test_awkward_vocabularies(topk: CudaTopk, vocab: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits = logits_of("holes", 3, vocab, dtype)
        assert_exact(logits, 7, *topk.topk_logprob(logits, 7))


def test_nan_of_either_sign_is_absent(topk: CudaTopk) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits = logits_of("normal", 2, SEGMENT, dtype)
        logits[:, ::3] = torch.nan
        logits[:, ::6] = logits[:, ::6].copysign(torch.tensor(-1.0))
        assert_exact(logits, 11, *topk.topk_logprob(logits, 11))


def test_any_stride_and_alignment(topk: CudaTopk) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits = logits_of("normal", 4, SEGMENT + 9, dtype)[1:, 3:]
        assert_exact(logits, 9, *topk.topk_logprob(logits, 9))


def shards_of(logits: Tensor, edges: list[int], topk: CudaTopk, k: int) -> list[Tensor]:
    parts = [
        topk.topk_partial(logits[:, low:high], k, low)
        for low, high in zip(edges, [*edges[1:], logits.shape[1]], strict=True)
    ]
    return [
        torch.stack([getattr(part, name) for part in parts]) for name in ("value", "id", "mass")
    ]


@pytest.mark.parametrize("kind", ["normal", "band", "holes", "dead", "huge"])
def test_merged_shards_give_the_unsharded_result(topk: CudaTopk, kind: str) -> None:
    logits = logits_of(kind, 3, SEGMENT + 1500, torch.bfloat16)
    merged = topk.merge_topk(*shards_of(logits, [0, 1024, 5120, SEGMENT], topk, 12))
    assert same(merged, topk.topk_logprob(logits, 12))


def test_small_shards_are_padded(topk: CudaTopk) -> None:
    logits = logits_of("holes", 3, 20, torch.float32)
    token, score = topk.merge_topk(*shards_of(logits, [0, 2, 9, 10], topk, 24))
    assert_exact(logits, 24, token, score)
