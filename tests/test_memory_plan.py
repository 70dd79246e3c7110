"""The plan's figures are those of what an engine then takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kdray import demo
from kdray.cards import Card, card_found, card_named, host_bytes
from kdray.config import EngineConfig
from kdray.errors import ConfigError
from kdray.facts import resolve, row_format
from kdray.kernels.ops import load_ops
from kdray.memory_plan import (
    GIB,
    SPARE_PAGES,
    MemoryPlan,
    Planned,
    fitting_ranks,
    plan_of_start,
)
from kdray.model.config import ModelConfig
from kdray.model.dflash_config import DFlashConfig
from kdray.model.dflash_weights import load_weights
from kdray.model.draft_int4 import MlpForm, PackedDraftMLP
from kdray.model.drafter import DFlashDrafter
from kdray.model.parallel import Shard
from kdray.model.target import TargetModel
from kdray.model.weight_bytes import drafter_bytes, table_bytes, target_bytes
from kdray.verifier.kv_cache import KVCache
from tests.model.tiny import save_plain

KIMI = Path(__file__).resolve().parents[1] / "jobs" / "kimi_k26"
RTX = card_named("RTX PRO 6000")


def kimi(tp: int, **wishes: object) -> Planned:
    config = EngineConfig(model=str(KIMI), tp=tp, **wishes)  # type: ignore[arg-type]
    model = ModelConfig.from_folder(KIMI)
    return Planned(
        config=config,
        model=model,
        drafter=DFlashConfig.from_folder(KIMI / "drafter"),
        dtype=torch.bfloat16,
        kv_row=row_format(config, model, torch.bfloat16),
        packed=True,
        on_gpu=True,
    )


def tensors_of(value: object, seen: set[int]) -> int:
    """Bytes of all tensors that are reached from an object, each memory once."""
    if isinstance(value, torch.Tensor):
        if value.data_ptr() in seen:
            return 0
        seen.add(value.data_ptr())
        return value.numel() * value.dtype.itemsize
    if isinstance(value, tuple | list):
        return sum(tensors_of(item, seen) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return sum(tensors_of(getattr(value, name), seen) for name in value.__dataclass_fields__)
    return 0


@pytest.mark.parametrize("kind", ["kimi", "deepseek", "plain_query", "wide_tp"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_target_bytes_are_those_of_a_loaded_model(tmp_path: Path, kind: str, ranks: int) -> None:
    folder = save_plain(tmp_path / "model", kind)
    model = TargetModel.load(folder, ops=load_ops("cpu"), shard=Shard(ranks - 1, ranks))
    planned = target_bytes(model.config, ranks, torch.float32, packed=False)
    held = tensors_of((model.embedding, model.layers, model.final_norm, model.head), set())
    scalars = 4 * (4 * len(model.layers) + 1)  # the norms' epsilons
    assert held - scalars <= planned.total <= held


@pytest.mark.parametrize("form", ["whole", "rounded", "packed"])
def test_drafter_bytes_are_those_of_a_loaded_drafter(form: MlpForm) -> None:
    folder = demo.drafter_path()
    config = DFlashConfig.from_folder(folder)
    weights = load_weights(folder, config, torch.float32, torch.device("cpu"), form)
    held = tensors_of(weights, set())
    repeated = sum(
        tensors_of((layer.head_norm.weight, layer.key_norm.weight), set())
        for layer in weights.layers
    )
    mlps = [layer.mlp for layer in weights.layers]
    packed = [mlp for mlp in mlps if isinstance(mlp, PackedDraftMLP)]
    shared = tensors_of([mlp.every for mlp in packed], set())
    planned = drafter_bytes(config, torch.float32, form)
    assert planned.mlps == tensors_of(mlps, set()) - shared
    assert 0 <= held - shared - planned.total <= repeated + 64 * len(weights.layers)


def test_kimis_drafter_in_int4_leaves_room_for_pages() -> None:
    """18 matrices of 7168 by 18432, of which each weight loses 1.4375 bytes."""
    saved = 18 * 7168 * 18432 * (2 - 0.5 - 2 / 32)
    wide, narrow = (kimi(8, draft_tp=1, draft_weights=w).plan(0, RTX) for w in ("auto", "int4"))
    assert narrow.room - wide.room == saved
    names = {item.name: item.bytes for item in narrow.items}
    assert names["drafter's weights"] / GIB == pytest.approx(3.30, abs=0.005)
    assert names["its MLPs, INT4 with bf16 scales"] == 18 * 7168 * 18432 * 0.5625
    assert "its MLPs, bf16" in {item.name for item in wide.items}


def test_kimi_k26_on_eight_cards_by_the_sum() -> None:
    """kv_a and q_a whole; an INT4 weight is half a byte and a 32nd of a bf16 scale."""
    experts = 60 * 384 * 3 * 7168 * 2048 * (0.5 + 2 / 32) / 8
    attention = 61 * (12288 * 1536 + 16384 * 512 + 7168 * 8192) * 2 / 8
    tables = 2 * 163840 * 7168 * 2 / 8
    dense = (60 * 3 * 7168 * 2048 + 3 * 7168 * 18432) * 2 / 8
    whole = 61 * ((1536 + 576) * 7168 + 2 * 7168 + 1536 + 512) * 2 + 7168 * 2
    held, wide = (60 * 384 * (7168 * size + 4) for size in (2, 4))
    plan = kimi(8).plan(0, RTX)
    assert plan.weights == experts + attention + tables + dense + whole + held
    assert f"{plan.weights / GIB:.2f}" == "70.95"
    in_fp32 = target_bytes(kimi(8).model, 8, torch.bfloat16, packed=True).total
    assert in_fp32 == plan.weights - held + wide
    assert f"{in_fp32 / GIB:.1f}" == "71.3"
    assert plan.fits and kimi(8).plan(1, RTX).fits
    plan = kimi(8, draft_tp=1).plan(0, RTX)
    names = {item.name: item.bytes for item in plan.items}
    assert names["drafter's weights"] / GIB == pytest.approx(6.48, abs=0.005)
    assert plan.fits


def test_kimi_k26_does_not_fit_on_four() -> None:
    plan = kimi(4).plan(0, RTX)
    assert plan.weights / GIB == pytest.approx(139.87, abs=0.01)
    with pytest.raises(ConfigError, match=r"rank 0 of 4 does not fit on RTX PRO 6000.*of 95\.6"):
        plan.check()
    assert plan.pages == 0
    wider = [kimi(tp) for tp in (4, 8, 16)]
    assert fitting_ranks(wider, RTX) == 8
    assert fitting_ranks(wider, card_named("24 GB")) is None


def test_pages_are_what_is_left_and_the_drafting_rank_has_fewer() -> None:
    first, other = kimi(8, draft_tp=1).plans(RTX)
    assert first.room == RTX.total - first.fixed
    assert first.pages == first.room // first.page_bytes - SPARE_PAGES
    # Rows of 576 numbers and 16 bytes, in 61 layers; keys and values of 8 heads in 6.
    assert other.page_bytes == 16 * 61 * (576 * 2 + 16)
    assert first.page_bytes == other.page_bytes + 16 * 6 * 2 * 8 * 128 * 2
    assert other.by_format == {"bf16": other.page_bytes, "fp8": 16 * 61 * 656}
    assert first.pages < other.pages
    more = kimi(8, draft_tp=1, max_requests=64, budget=32).plan(0, RTX)
    assert more.room < first.room


def test_more_pages_than_fit_are_refused_with_the_number_that_does() -> None:
    planned = kimi(8)
    room = planned.plan(0, RTX).pages
    assert replace(planned, num_pages=room).plan(0, RTX).fits
    assert (room + SPARE_PAGES) * planned.page_bytes(0) <= planned.plan(0, RTX).room
    with pytest.raises(ConfigError, match=f"num-pages {room} .*of 16 tokens. would fit"):
        replace(planned, num_pages=room + 1).plan(0, RTX).check()


def test_pages_by_memory_hold_the_drafters_part_too() -> None:
    config = EngineConfig(device="cpu", kv_memory_bytes=1 << 22, max_requests=64)
    facts = resolve(config)
    assert facts.num_pages == (1 << 22) // plan_of_start(config, facts, rank=0).page_bytes
    assert resolve(replace(config, drafter="none")).num_pages > facts.num_pages


def test_memory_that_others_took_counts() -> None:
    busy = replace(RTX, taken=20 * GIB)
    lost = kimi(8).plan(1, RTX).room - kimi(8).plan(1, busy).room
    assert 19 * GIB < lost < 20 * GIB


def test_what_is_not_counted_has_a_line_of_its_own() -> None:
    def reserve(plan: MemoryPlan) -> float:
        [held] = [item.bytes for item in plan.items if item.name.startswith("reserve")]
        line = f"{'  reserve, for what is not counted':<62}{held / GIB:8.2f}"
        assert line in plan.text().splitlines()
        return held / plan.card.total

    b200, host = card_named("B200"), Card("this host", 8 * GIB)
    assert reserve(kimi(8).plan(0, RTX)) == 2 * GIB / RTX.total
    assert reserve(kimi(8).plan(0, b200)) == pytest.approx(0.02)
    assert reserve(replace(kimi(8), on_gpu=False).plan(0, host)) == pytest.approx(0.01)


def test_rounds_in_graphs_hold_their_arrays_beside_those_of_a_step() -> None:
    names = {item.name: item.bytes for item in kimi(8).plan(0, RTX).items}
    rows = 16 * (1 + 16)
    logits_of_drafts = 2 * 16 * 8 * 163840 // 8 * 4
    experts_of_rows = rows * 3 * 8 * 7168 * 2
    assert names["CUDA graphs"] > logits_of_drafts + experts_of_rows
    stepping = {item.name for item in kimi(8, graphs=False).plan(0, RTX).items}
    assert "CUDA graphs" not in stepping


def test_experts_that_are_not_packed_need_room_for_all_their_outputs() -> None:
    """512 rows of a prompt by 384 experts of 2048 / 8, as kdray.model.moe runs them."""
    inner, outputs = 3 * 512 * 384 * 256, 512 * 384 * 7168
    packed, unpacked = (
        {item.name: item.bytes for item in planned.plan(1, RTX).items}
        for planned in (kimi(8), replace(kimi(8), packed=False))
    )
    more = unpacked["workspaces"] - packed["workspaces"]
    assert more == (inner + outputs) * 2


def test_the_plan_of_a_start_counts_its_pages_by_the_byte() -> None:
    config = EngineConfig(device="cpu", max_requests=2, max_model_len=128)
    facts = resolve(config)
    plan = plan_of_start(config, facts, 0)
    cache = KVCache(
        num_layers=facts.model.num_hidden_layers,
        num_pages=facts.num_pages + 1,
        page_size=config.page_size,
        row=facts.kv_row,
        device=facts.device,
    )
    target = TargetModel.load(facts.target, ops=load_ops("cpu"))
    assert facts.drafter is not None
    drafter = DFlashDrafter.load(
        facts.drafter,
        target,
        ops=load_ops("cpu"),
        candidates=4,
        page_size=config.page_size,
        num_pages=facts.num_pages + 1,
    )
    assert plan.num_pages == facts.num_pages
    held = tensors_of([*cache.rows, *drafter.cache], set())
    assert (plan.num_pages + SPARE_PAGES) * plan.page_bytes == held
    assert plan.fits and "left for KV pages" in plan.text()


def test_tables_are_counted_where_they_are_read_again() -> None:
    alone, shared, apart = (
        {item.name for item in planned.plan(0, RTX).items if "for the drafter" in item.name}
        for planned in (kimi(1), kimi(2), kimi(2, draft_tp=1))
    )
    assert not alone and not shared and len(apart) == 1
    assert table_bytes(kimi(8).model, torch.bfloat16) == 2 * 163840 * 7168 * 2


@pytest.mark.parametrize(
    ("text", "name", "total"),
    [
        ("RTX PRO 6000", "RTX PRO 6000", 97_887 << 20),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 97_887 << 20),
        ("nvidia h200", "H200", 143_771 << 20),
        ("H20", "H20", 97_871 << 20),
        ("96 GiB", "a card of 96 GiB", 96 << 30),
        ("80GB", "a card of 80GB", 80 * 10**9),
    ],
)
def test_cards_by_name_and_by_size(text: str, name: str, total: int) -> None:
    assert card_named(text) == Card(name, total)


def test_unknown_cards_are_refused() -> None:
    with pytest.raises(ConfigError, match="'H2000' is not known; give its memory"):
        card_named("H2000")


def test_on_a_cpu_ranks_share_the_host() -> None:
    whole, half = (card_found(torch.device("cpu"), ranks) for ranks in (1, 2))
    assert whole.total == host_bytes() > 0
    assert half.total == whole.total // 2
