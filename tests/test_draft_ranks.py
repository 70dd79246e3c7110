"""Which ranks share a drafter, and what each of them holds of it."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from kdray.arguments import add_engine_arguments, engine_config
from kdray.config import EngineConfig
from kdray.engine_drafter import load_drafter
from kdray.errors import ConfigError
from kdray.facts import draft_ranks, resolve
from kdray.kernels.ops import load_ops
from kdray.memory_plan import GIB, SPARE_PAGES, MemoryPlan, plan_of_start
from kdray.model.dflash_config import DFlashConfig
from kdray.model.parallel import Shard
from kdray.model.target import TargetModel
from kdray.serve.arguments import parse_arguments
from kdray.verifier.kv_cache import KVCache
from tests.model.test_drafter import FITTING
from tests.model.tiny import save_plain
from tests.model.tiny_drafter import write_drafter
from tests.test_memory_plan import KIMI, RTX, kimi, tensors_of

OPS = load_ops("cpu")
KIMIS = DFlashConfig.from_folder(KIMI / "drafter")
MATRICES = 18 * 7168 * 18432  # numbers of Kimi's drafter's MLPs


def wish(**wishes: object) -> EngineConfig:
    return EngineConfig(**{"device": "cpu", **wishes})  # type: ignore[arg-type]


def bytes_by_name(plan: MemoryPlan) -> dict[str, int]:
    return {item.name: item.bytes for item in plan.items}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target and a drafter that two ranks can share."""
    home = tmp_path_factory.mktemp("folders")
    fields = FITTING | {"intermediate_size": 64}
    drafter = write_drafter(home / "drafter", fields)
    return {"model": str(save_plain(home / "target")), "drafter": str(drafter)}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_all_ranks_share_kimis_drafter(tp: int, weights: str) -> None:
    assert draft_ranks(wish(tp=tp, draft_weights=weights), KIMIS) == tp
    assert draft_ranks(wish(tp=tp, draft_weights=weights, draft_tp=tp), KIMIS) == tp
    assert draft_ranks(wish(tp=tp, draft_weights=weights, draft_tp=1), KIMIS) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 60},
        {"num_kv_heads": 4},
        {"intermediate_size": 18436},
        {"hidden_size": 7164, "target_layer_ids": (1,)},
    ],
    ids=str,
)
def test_rank_0_drafts_alone_where_a_part_would_be_smaller_or_larger(
    changes: dict[str, int],
) -> None:
    drafter = replace(KIMIS, **changes)  # type: ignore[arg-type]
    assert draft_ranks(wish(tp=8), drafter) == 1
    assert draft_ranks(wish(tp=8, draft_tp=1), drafter) == 1
    assert draft_ranks(wish(tp=2), drafter) == 2
    with pytest.raises(ConfigError, match=r"8 ranks cannot share the drafter.*; use draft_tp 1$"):
        draft_ranks(wish(tp=8, draft_tp=8), drafter)


def test_groups_of_int4_are_not_cut() -> None:
    drafter = replace(KIMIS, intermediate_size=8 * 48)
    assert draft_ranks(wish(tp=8), drafter) == 8
    assert draft_ranks(wish(tp=4, draft_weights="int4"), drafter) == 4
    assert draft_ranks(wish(tp=8, draft_weights="int4"), drafter) == 1
    with pytest.raises(ConfigError, match=r"48 on each of 8 ranks is no .* or use draft_tp 1$"):
        draft_ranks(wish(tp=8, draft_tp=8, draft_weights="int4"), drafter)


def test_the_facts_say_who_shares() -> None:
    assert resolve(wish()).draft_ranks == 1
    assert resolve(wish(tp=2)).draft_ranks == 2
    assert resolve(wish(tp=2, draft_tp=1)).draft_ranks == 1
    assert resolve(wish(tp=4)).draft_ranks == 1, "the demo's drafter has 2 key heads"
    for plain in ({"mode": "plain"}, {"drafter": "none"}):
        assert resolve(wish(tp=2, draft_tp=2, **plain)).draft_ranks == 1
    with pytest.raises(ConfigError, match=r"of 4 heads, 2 key heads.*use draft_tp 1"):
        resolve(wish(tp=4, draft_tp=4))


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("draft_tp", [0, -1, 3, 16])
def test_some_of_the_ranks_cannot_share(tp: int, draft_tp: int) -> None:
    with pytest.raises(ConfigError, match=f"must be 1 or tp, which is {tp}, got {draft_tp}"):
        EngineConfig(tp=tp, draft_tp=draft_tp)


def test_the_wish_reaches_the_config() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)

    def of(*words: str) -> int | None:
        return engine_config(parser.parse_args(["--tp", "2", *words])).draft_tp

    assert of() is EngineConfig().draft_tp is None, "all ranks, unless told otherwise"
    assert of("--draft-tp", "auto") is None
    assert of("--draft-tp", "2") == 2
    assert of("--draft-tp", "1") == 1
    with pytest.raises(ConfigError, match="draft_tp must be 1 or tp"):
        of("--draft-tp", "4")
    with pytest.raises(ConfigError, match="draft-tp must be a number or 'auto', got 'all'"):
        of("--draft-tp", "all")
    assert parse_arguments({"tp": "2", "draft_tp": "1"}).config.draft_tp == 1
    for left_open in ("auto", "none"):
        assert parse_arguments({"tp": "2", "draft_tp": left_open}).config.draft_tp is None


def test_every_rank_has_an_eighth_of_kimis_drafter() -> None:
    [first] = kimi(8).plans(RTX)
    other, alone = kimi(8).plan(7, RTX), kimi(8, draft_tp=1).plan(0, RTX)
    assert other.items == first.items and other.page_bytes == first.page_bytes
    mine, whole = bytes_by_name(first), bytes_by_name(alone)
    norms = 2 * (2 * 7168 + 6 * (2 * 7168 + 2 * 128))
    assert 8 * (mine["drafter's weights"] - norms) == whole["drafter's weights"] - norms
    assert mine["its MLPs, bf16"] == MATRICES * 2 // 8
    assert mine["drafter's weights"] / GIB == pytest.approx(0.81, abs=0.005)
    tables = "target's embedding and head, whole, for the drafter"
    assert tables in whole and tables not in mine
    assert first.room > alone.room + 5.6 * GIB + whole[tables]


def test_int4_saves_every_rank_an_eighth() -> None:
    wide, narrow = (kimi(8, draft_weights=w).plan(3, RTX) for w in ("auto", "int4"))
    assert narrow.room - wide.room == MATRICES * (2 - 0.5 - 2 / 32) / 8
    assert bytes_by_name(narrow)["its MLPs, INT4 with bf16 scales"] == MATRICES * 0.5625 / 8


def test_a_page_holds_the_keys_of_a_ranks_heads() -> None:
    target = 16 * 61 * (576 * 2 + 16)
    assert {kimi(8).page_bytes(rank) for rank in range(8)} == {target + 16 * 6 * 2 * 128 * 2}
    assert kimi(8, draft_tp=1).page_bytes(0) == target + 16 * 6 * 2 * 8 * 128 * 2
    assert kimi(8).plan(0, RTX).pages > 1.3 * kimi(8, draft_tp=1).plan(0, RTX).pages


@pytest.mark.parametrize("weights", ["auto", "int4"])
@pytest.mark.parametrize("draft_tp", [None, 1])
def test_a_ranks_plan_is_what_it_loads(
    folders: dict[str, str], draft_tp: int | None, weights: str
) -> None:
    config = wish(**folders, tp=2, draft_tp=draft_tp, draft_weights=weights, num_pages=9)
    facts = resolve(config)
    for rank in range(facts.draft_ranks):
        plan = plan_of_start(config, facts, rank)
        target = TargetModel.load(facts.target, ops=OPS, shard=Shard(rank, 2))
        drafter = load_drafter(config, facts, OPS, target)
        assert drafter is not None
        weights_held = drafter.network.weights
        repeated = tensors_of([(x.head_norm, x.key_norm) for x in weights_held.layers], set())
        once = 4 * 2 * 2 * 16  # q and k norms of two layers, of 16 numbers
        scalars = 4 * (2 + 2 * len(weights_held.layers))  # the other norms' epsilons
        held = tensors_of(weights_held, set()) - repeated + once - scalars
        assert bytes_by_name(plan)["drafter's weights"] == held
        own = {target.embedding.data_ptr(), target.head.data_ptr()}
        beside = [item.bytes for item in plan.items if "for the drafter" in item.name]
        assert sum(beside) == (0 if facts.draft_ranks == 2 else tensors_of(drafter.tables, own))
        rows = KVCache.bytes_per_page(
            num_layers=facts.model.num_hidden_layers,
            page_size=config.page_size,
            row=facts.kv_row,
            device=torch.device("cpu"),
        )
        pages = 9 + SPARE_PAGES
        assert pages * (plan.page_bytes - rows) == tensors_of(drafter.cache, set())
    if draft_tp == 1:
        assert "drafter's weights" not in bytes_by_name(plan_of_start(config, facts, 1))
