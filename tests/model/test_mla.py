from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kdray.kernels.ops import Ops, load_ops
from kdray.model.mla import KEY_BLOCK, ROW_BLOCK, AttentionSplit, LatentAttention, LongRows, Rows
from kdray.model.target import TargetModel
from tests.model.paged import PagedRunner, Part, Text, make_batch
from tests.model.plain_attention import PlainAttention
from tests.model.tiny import save_plain

EXPAND_ALL = 1
EXPAND_NONE = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain(tmp_path_factory.mktemp("mla") / "kimi")


def attend(
    model: TargetModel, runner: PagedRunner, parts: list[Part], x: Tensor, expand_from: int
) -> Tensor:
    """Layer 0's attention of rows x, in the form that expand_from picks."""
    batch = make_batch(parts, runner.page_size)
    rows = Rows(
        turns=model.rope.turns(batch.position),
        slot=batch.slot,
        split=AttentionSplit.of(batch.attention, expand_from),
    )
    return model.layers[0].attention.partial(x, rows, runner.caches[0])


@pytest.mark.parametrize("ops", [load_ops("cpu"), PlainAttention()])
@pytest.mark.parametrize("page_size", [1, 16])
def test_absorbed_and_expanded_agree_on_mixed_batches(
    folder: Path, ops: Ops, page_size: int
) -> None:
    """Long chunks with and without cached tokens beside a tree, in both forms."""
    model = TargetModel.load(folder, ops=ops)
    runner = PagedRunner(model, page_size=page_size, num_pages=400 // page_size)
    fresh, tree, grown = runner.text(20), runner.text(30), runner.text(90)
    runner.run(Part(tree, [5] * 9), Part(grown, [6] * 40))
    parts = [
        Part(fresh, [7] * 17),
        Part(tree, [8], draft=[1, 2, 3, 4], parents=[0, 0, 1, 3]),
        Part(grown, [9] * 33),
    ]
    x = torch.randn(17 + 5 + 33, model.config.hidden_size)
    absorbed = attend(model, runner, parts, x, EXPAND_NONE)
    mixed = attend(model, runner, parts, x, 17)
    torch.testing.assert_close(mixed, absorbed, rtol=1e-5, atol=1e-5)


def test_absorbed_and_expanded_agree_over_rows_in_fp8(folder: Path) -> None:
    model = TargetModel.load(folder, ops=load_ops("cpu"))
    runner = PagedRunner(model)
    runner.keep_in_fp8()
    fresh, grown = runner.text(20), runner.text(90)
    runner.run(Part(grown, [6] * 40))
    parts = [Part(fresh, [7] * 17), Part(grown, [9] * 33)]
    x = torch.randn(17 + 33, model.config.hidden_size, generator=torch.Generator().manual_seed(4))
    absorbed = attend(model, runner, parts, x, EXPAND_NONE)
    expanded = attend(model, runner, parts, x, EXPAND_ALL)
    torch.testing.assert_close(expanded, absorbed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cached", [0, 1, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, KEY_BLOCK + 37])
@pytest.mark.parametrize("rows", [1, 70])
def test_expanded_equals_a_plain_softmax_over_several_key_blocks(cached: int, rows: int) -> None:
    heads, nope, rope, latent, value = 2, 6, 4, 8, 5
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    attention = LatentAttention(
        ops=PlainAttention(),
        down=torch.empty(0),
        query_norm=None,
        query_up=None,
        latent_norm=None,  # type: ignore[arg-type]
        key_up=random(heads, nope, latent),
        value_up=random(heads, latent, value),
        output=torch.empty(0),
        scale=0.3,
    )
    cache = random(2 * KEY_BLOCK, latent + rope)
    slots = torch.randperm(2 * KEY_BLOCK, generator=generator)[: cached + rows]
    query = random(rows, heads, nope + rope)
    found = attention._expanded(query, cache, LongRows(slice(0, rows), cached, slots))

    kept = cache[slots].double()
    for h in range(heads):
        key = torch.cat([kept[:, :latent] @ attention.key_up[h].T.double(), kept[:, latent:]], 1)
        score = query[:, h].double() @ key.T * attention.scale
        seen = torch.ones(rows, cached + rows).tril(cached).bool()
        weight = score.masked_fill(~seen, -math.inf).softmax(-1)
        exact = weight @ (kept[:, :latent] @ attention.value_up[h].double())
        torch.testing.assert_close(found[:, h].double(), exact, rtol=1e-5, atol=1e-5)


def test_split_sends_each_request_to_its_form() -> None:
    texts = [Text([0, 1], 0), Text([2, 3], 3), Text([4, 5], 5)]
    parts = [Part(texts[0], [1] * 8), Part(texts[1], [1], [2], [0]), Part(texts[2], [1] * 9)]
    batch = make_batch(parts, page_size=16).attention
    everything = AttentionSplit.of(batch, 100)
    assert everything.absorbed is batch
    assert everything.absorbed_rows is None
    mixed = AttentionSplit.of(batch, 9)
    assert mixed.absorbed is not None and mixed.absorbed_rows is not None
    assert mixed.absorbed.row_start == (0, 8, 10)
    assert mixed.absorbed.num_cached == (0, 3)
    assert mixed.absorbed_rows.tolist() == list(range(10))
    assert [(long.rows, long.num_cached) for long in mixed.expanded] == [(slice(10, 19), 5)]
    assert mixed.expanded[0].slots.tolist() == list(range(64, 78))
    trees_stay = AttentionSplit.of(batch, 1)
    assert trees_stay.absorbed is not None
    assert trees_stay.absorbed.row_start == (0, 2)


def test_a_very_long_chunk_is_cut_into_pieces_that_see_what_came_before() -> None:
    rows = ROW_BLOCK + 10
    batch = make_batch([Part(Text(list(range(40)), 7), [1] * rows)], page_size=16).attention
    first, second = AttentionSplit.of(batch, rows).expanded
    assert (first.rows, first.num_cached, len(first.slots)) == (slice(0, 128), 7, 135)
    assert (second.rows, second.num_cached, len(second.slots)) == (slice(128, 138), 135, 145)


def test_the_cache_row_is_the_normed_latent_then_the_rotated_key(folder: Path) -> None:
    model = TargetModel.load(folder, ops=load_ops("cpu"))
    runner = PagedRunner(model)
    text = runner.text(40)
    runner.run(Part(text, [5] * 3))
    x = torch.randn(2, model.config.hidden_size)
    part = Part(text, [8, 9])
    attend(model, runner, [part], x, EXPAND_NONE)
    attention = model.layers[0].attention
    _, latent, key = (x @ attention.down).split([model.config.q_lora_rank, 32, 8], dim=-1)
    rows = runner.caches[0][make_batch([part], 16).slot]
    torch.testing.assert_close(rows[:, :32], attention.latent_norm(latent))
    torch.testing.assert_close(rows[:, 32:].norm(dim=-1), key.norm(dim=-1))
