"""The same text in passes of every shape: the same logits, and what experts it visits."""

from __future__ import annotations

import pytest
import torch
from causes import ORDERS, SHAPES, WHOLE
from plain_passes import NUDGED, PlainPasses, Shape, nudged
from plain_rows import chunk, round_rows, tree

from kdray.demo import target_path
from kdray.kernels.latent_rows import RowFormat
from kdray.kernels.ops import load_ops
from kdray.model.target import TargetModel

TEXT = [1920, *range(40, 110)]


def passes_of(device: str, dtype: torch.dtype) -> PlainPasses:
    model = TargetModel.load(target_path(), ops=load_ops(device), dtype=dtype, device=device)
    sizes = model.config
    return PlainPasses.of(model, RowFormat.of(sizes.kv_lora_rank, sizes.qk_rope_head_dim, dtype))


@pytest.fixture(scope="module")
def passes() -> PlainPasses:
    return passes_of("cpu", torch.float32)


@pytest.mark.parametrize("text", [TEXT, TEXT[:1], TEXT[:2], TEXT[:7]], ids=len)
def test_in_fp32_every_shape_gives_the_same(passes: PlainPasses, text: list[int]) -> None:
    whole = passes.run(text, WHOLE)
    assert whole.expert.shape == (5, len(text), 2) and whole.gap.shape == (5, len(text))
    for shape in ORDERS:
        passed = passes.run(text, shape)
        assert abs(passed.logits - whole.logits).max() < 1e-4, shape
        assert torch.allclose(passed.gap, whole.gap, atol=1e-4), shape
        assert (passed.expert != whole.expert).any(-1).sum() <= (whole.gap < 1e-4).sum(), shape


def test_the_rows_of_the_last_pass_see_their_own_text_alone(passes: PlainPasses) -> None:
    """Another token anywhere in the text changes what the last one sees."""
    whole = passes.run(TEXT, WHOLE)
    for at in (0, 30, 66, 69):
        other = [*TEXT[:at], 1000, *TEXT[at + 1 :]]
        for shape in (WHOLE, Shape(5), Shape(5, "tree"), Shape(5, "round", piece=3, beside=3)):
            assert abs(passes.run(other, shape).logits - whole.logits).max() > 1e-3


def test_told_experts_are_visited(passes: PlainPasses) -> None:
    whole = passes.run(TEXT, WHOLE)
    same = passes.run(TEXT, Shape(5, "round", beside=2), whole.expert)
    assert abs(same.logits - whole.logits).max() < 1e-4
    told = torch.tensor([0, 1]).expand_as(whole.expert)
    for shape in (WHOLE, Shape(5, "tree", piece=4)):
        passed = passes.run(TEXT, shape, told)
        assert torch.equal(passed.expert, told)
        assert abs(passed.logits - whole.logits).max() > 1
    assert torch.equal(passes.run(TEXT, WHOLE).expert, whole.expert)


def test_a_tree_holds_the_text_and_a_wrong_sibling_at_each_depth() -> None:
    part = tree([7, 8, 9, 4], 1)
    assert part.token == [8, 8, 9, 3, 4] and part.parents == [0, 0, 2, 2]
    assert [part.token[i] for i in part.mine] == [8, 9, 4] and part.num_cached == 1
    batch = round_rows([part, chunk([7], 0, 1)], 1, torch.device("cpu"))
    assert batch.position.tolist() == [1, 2, 2, 3, 3, 0, 1, 1, 1, 1]
    assert batch.slot.tolist() == [1, 2, 3, 4, 5, 16, 17, 18, 19, 20]
    assert batch.attention.mask[0, :, 0].tolist() == [0b1, 0b11, 0b101, 0b1101, 0b10101]


def test_a_nudge_moves_some_numbers_to_the_next_ones() -> None:
    embedding = torch.randn(500, 64).bfloat16()
    moved = nudged(embedding, 3)
    places = moved != embedding
    assert abs(float(places.float().mean()) * NUDGED - 1) < 0.3
    assert ((moved - embedding).abs() <= embedding.abs() * 2.0**-7).all()
    assert torch.equal(nudged(embedding, 3), moved) and not torch.equal(nudged(embedding, 4), moved)


@pytest.mark.gpu
@pytest.mark.parametrize("text", [4 * TEXT, TEXT, TEXT[:1]], ids=len)
def test_a_gpu_gives_the_same_in_every_shape(passes: PlainPasses, text: list[int]) -> None:
    """In bf16 as far as its rounding, for most shapes: experts may give way to others."""
    whole = passes.run(text, WHOLE)
    exact, rounded = (passes_of("cuda", dtype) for dtype in (torch.float32, torch.bfloat16))
    off = []
    for shape in SHAPES[: len(ORDERS) + 6]:
        if not shape.nudge:
            assert abs(exact.run(text, shape).logits - whole.logits).max() < 2e-3, shape
        told = rounded.run(text, shape, whole.expert)
        assert torch.equal(told.expert, whole.expert)
        off.append(float(abs(told.logits - whole.logits).max()))
    assert sorted(off)[len(off) // 2] < 1
