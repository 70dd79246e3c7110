"""Tree attention against a loop over rows and keys, on a cache whose unwritten slots hold NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kdray.core.tree import ancestor_mask
from kdray.kernels import reference_attention
from kdray.kernels.attention_batch import AttentionBatch
from kdray.kernels.ops import Ops

HEADS, LATENT, ROPE = 3, 8, 4
SCALE = 0.3


@dataclass(frozen=True)
class Part:
    """One request: cached tokens, known tokens, and the parents of its tree (node 0 = root)."""

    cached: int
    known: int
    parent: tuple[int, ...] = (-1,)

    @property
    def rows(self) -> int:
        return self.known + len(self.parent) - 1

    def sees(self, row: int, key: int) -> bool:
        """Whether a row sees the key at a cache position."""
        root = self.cached + self.known - 1
        if row < self.known:
            return key <= self.cached + row
        node = row - self.known + 1
        while node > 0:
            if key == root + node:
                return True
            node = self.parent[node]
        return key <= root


@dataclass(frozen=True)
class Case:
    query: Tensor
    cache: Tensor
    batch: AttentionBatch


def make_case(parts: list[Part], page_size: int, dtype: torch.dtype = torch.float32) -> Case:
    """Pages dealt out at random; padding of the page table points nowhere."""
    pages = [-(-(part.cached + part.rows) // page_size) for part in parts]
    order = torch.randperm(sum(pages) + 3).int()
    table = torch.full((len(parts), max(pages) + 1), -1, dtype=torch.int32)
    taken = 0
    for r, count in enumerate(pages):
        table[r, :count] = order[taken : taken + count]
        taken += count
    num_nodes = max(len(part.parent) for part in parts)
    mask = np.zeros((len(parts), num_nodes, -(-num_nodes // 32)), dtype=np.uint32)
    for r, part in enumerate(parts):
        words = ancestor_mask(part.parent)
        mask[r, : len(words), : words.shape[1]] = words
    batch = AttentionBatch(
        row_start=tuple(int(n) for n in np.cumsum([0, *(part.rows for part in parts)])),
        num_cached=tuple(part.cached for part in parts),
        num_known=tuple(part.known for part in parts),
        page_table=table,
        page_size=page_size,
        mask=torch.from_numpy(mask.view(np.int32)),
    )
    cache = torch.full((len(order) * page_size, LATENT + ROPE), torch.nan, dtype=dtype)
    for r, part in enumerate(parts):
        written = batch.slots[r, : part.cached + part.rows]
        cache[written] = torch.randn(len(written), LATENT + ROPE).to(dtype)
    query = torch.randn(batch.row_start[-1], HEADS, LATENT + ROPE).to(dtype)
    return Case(query=query, cache=cache, batch=batch)


def attend_by_loops(case: Case, parts: list[Part]) -> Tensor:
    query, cache = case.query.double(), case.cache.double()
    out = torch.empty(*query.shape[:2], LATENT, dtype=torch.float64)
    for r, part in enumerate(parts):
        for row in range(part.rows):
            keys = [p for p in range(part.cached + part.rows) if part.sees(row, p)]
            seen = cache[case.batch.slots[r, keys]]
            flat = case.batch.row_start[r] + row
            weight = (query[flat] @ seen.T * SCALE).softmax(-1)
            out[flat] = weight @ seen[:, :LATENT]
    return out


def check(ops: Ops, parts: list[Part], page_size: int) -> None:
    case = make_case(parts, page_size)
    out = ops.verify_attention(case.query, case.cache, case.batch, SCALE, LATENT)
    torch.testing.assert_close(out.double(), attend_by_loops(case, parts), rtol=1e-5, atol=1e-5)


CHAIN = tuple(range(-1, 8))
BUSHY = (-1, 0, 0, 1, 1, 2, 3, 0, 6)
WIDE = (-1, *([0] * 32), 1, 33, 34)  # more nodes than a mask word has bits


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    "parts",
    [
        [Part(0, 1)],
        [Part(15, 1)],
        [Part(16, 1)],
        [Part(0, 1, BUSHY)],
        [Part(8, 1, BUSHY)],
        [Part(5, 1, CHAIN), Part(24, 1, BUSHY)],
        [Part(0, 1), Part(100, 1)],
        [Part(3, 1, WIDE), Part(7, 1), Part(0, 9)],
        [Part(0, 17), Part(100, 1, BUSHY), Part(40, 6)],
        [Part(10, 4, BUSHY)],
    ],
    ids=str,
)
def test_rows_see_what_a_loop_sees(ops: Ops, parts: list[Part], page_size: int) -> None:
    check(ops, parts, page_size)


@pytest.mark.parametrize("known", [1, 4, 6, 11, 12, 13])
def test_long_requests_are_cut_into_blocks_of_rows(
    ops: Ops, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_attention, "TILE_ROWS", 5)
    monkeypatch.setattr(reference_attention, "SHORT_ROWS", 6)
    check(ops, [Part(7, known, BUSHY), Part(2, 1), Part(0, known), Part(3, 1, CHAIN)], page_size=4)


def test_contexts_of_very_different_length_get_tiles_of_their_own(ops: Ops) -> None:
    parts = [Part(700, 1, BUSHY), Part(0, 1), Part(600, 1), Part(3, 1, BUSHY)]
    case = make_case(parts, page_size=16)
    sizes = [tuple(tile.bias.shape[:2]) for tile in reference_attention.tile_batch(case.batch)]
    assert sizes == [(2, 9), (2, 9)]
    check(ops, parts, page_size=16)


def test_a_full_size_prompt_chunk(ops: Ops) -> None:
    check(ops, [Part(30, 300)], page_size=16)


def test_who_sees_whom_is_laid_out_once_a_batch(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    lay_out = reference_attention.tile_batch
    monkeypatch.setattr(
        "kdray.kernels.reference.tile_batch", lambda batch: calls.append(1) or lay_out(batch)
    )
    case = make_case([Part(4, 1, BUSHY)], page_size=4)
    first = ops.verify_attention(case.query, case.cache, case.batch, SCALE, LATENT)
    other_layer = torch.randn_like(case.cache)
    second = ops.verify_attention(case.query, other_layer, case.batch, SCALE, LATENT)
    assert len(calls) == 1 and not torch.equal(first, second)


def test_bfloat16_keeps_its_dtype_and_softmaxes_in_float32(ops: Ops) -> None:
    parts = [Part(20, 1, BUSHY)]
    case = make_case(parts, page_size=16, dtype=torch.bfloat16)
    out = ops.verify_attention(case.query, case.cache, case.batch, SCALE, LATENT)
    assert out.dtype == torch.bfloat16
    # One rounding to bfloat16 at the end: half a unit of 8 bits.
    torch.testing.assert_close(out.double(), attend_by_loops(case, parts), rtol=2**-8, atol=1e-4)


def test_a_page_table_that_is_too_short_is_refused(ops: Ops) -> None:
    case = make_case([Part(4, 1, BUSHY)], page_size=4)
    short = AttentionBatch(
        row_start=case.batch.row_start,
        num_cached=(400,),
        num_known=case.batch.num_known,
        page_table=case.batch.page_table,
        page_size=4,
        mask=case.batch.mask,
    )
    with pytest.raises(ValueError, match="page table"):
        ops.verify_attention(case.query, case.cache, short, SCALE, LATENT)


def test_equal_keys_mix_to_their_mean(ops: Ops) -> None:
    case = make_case([Part(2, 1)], page_size=4)
    cache = torch.full_like(case.cache, math.nan)
    written = case.batch.slots[0, :3]
    cache[written] = torch.ones(LATENT + ROPE)
    cache[written, 0] = torch.tensor([0.0, 3.0, 6.0])
    query = torch.zeros_like(case.query)
    out = ops.verify_attention(query, cache, case.batch, SCALE, LATENT)
    torch.testing.assert_close(out[0, :, 0], torch.full((HEADS,), 3.0))
