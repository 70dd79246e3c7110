"""Where nobody says how many KV pages there are: as many as the fullest rank's card holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

from kdray import kv_room
from kdray.cards import Card
from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.engine import build_engine, build_follower, build_verifier, make_request
from kdray.errors import ConfigError
from kdray.facts import CPU_KV_BYTES, EngineFacts, PageWish, max_model_len, page_wish, resolve
from kdray.kernels.ops import load_ops
from kdray.kv_room import cards_of_all, common_pages, decision, settle_pages
from kdray.memory_plan import GIB, HOST_RESERVE, SPARE_PAGES, Planned, planned_start
from kdray.model.parallel import Shard
from kdray.verifier.rank_group import RankGroup
from tests.test_memory_plan import RTX, kimi
from tests.thread_ranks import Meeting, QueueChannel, ThreadCollectives

Found = TypeVar("Found")


def wish_of(planned: Planned, *, on_gpu: bool = True) -> PageWish:
    longest = max_model_len(planned.config, planned.model)
    return page_wish(planned.config, longest, planned.page_bytes(0), on_gpu=on_gpu)


def open_facts(config: EngineConfig, most: int = 1 << 20) -> EngineFacts:
    """As a GPU's, so far as pages go."""
    return replace(resolve(config), num_pages=most, pages_by_room=True)


def holding(planned: Planned, rank: int, pages: int) -> Card:
    """A card that has room for so many pages of a rank, and for half a page more."""
    host = Card("a host", 64 * GIB)
    plan = planned.plan(rank, host)
    needed = plan.fixed - round(HOST_RESERVE * host.total)
    needed += (pages + SPARE_PAGES) * plan.page_bytes + plan.page_bytes // 2
    return Card("a host", round(needed / (1 - HOST_RESERVE)))


def on_ranks(
    cards: Sequence[Card],
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[Shard, ThreadCollectives], Found],
) -> list[Found]:
    """run() on every rank, in a thread each, of which each finds its own card."""
    meeting, here = Meeting(len(cards)), threading.local()
    monkeypatch.setattr(kv_room, "card_found", lambda device, ranks: cards[here.rank])

    def be(rank: int) -> Found:
        here.rank = rank
        return run(Shard(rank, len(cards)), ThreadCollectives(meeting, rank))

    with ThreadPoolExecutor(len(cards)) as pool:
        return list(pool.map(be, range(len(cards))))


def test_a_gpu_takes_the_room_there_is_and_a_cpu_a_gibibyte() -> None:
    planned = kimi(8)
    of_use = 16 * -(-(262144 + 16 + 16) // 16)
    assert wish_of(planned) == PageWish(of_use, by_room=True)
    assert wish_of(planned, on_gpu=False) == PageWish(CPU_KV_BYTES // planned.page_bytes(0))
    assert wish_of(kimi(8, num_pages=5)) == PageWish(5)
    assert wish_of(kimi(8, num_pages=5, kv_memory_bytes=1)) == PageWish(5)
    given = kimi(8, kv_memory_bytes=8 * GIB)
    assert wish_of(given) == PageWish(8 * GIB // given.page_bytes(0))
    short = kimi(8, kv_memory_bytes=1 << 40, max_model_len=1000, max_requests=2)
    assert wish_of(short) == PageWish(2 * -(-(1000 + 16 + 16) // 16))
    with pytest.raises(ConfigError, match="kv_memory_bytes 1000 holds no page of 1189120 bytes"):
        wish_of(kimi(8, kv_memory_bytes=1000))


def test_kimi_k26_on_eight_cards_has_room_for_long_texts() -> None:
    """A GiB of pages would be 11,000 tokens. Rank 0 has the least where it drafts alone."""
    plans = kimi(8, draft_tp=1).plans(RTX)
    count = common_pages(plans, 1 << 30)
    assert count == plans[0].pages < plans[1].pages
    assert count * 16 > 100_000
    assert all(replace(plan, num_pages=count).fits for plan in plans)
    assert not replace(plans[0], num_pages=count + 1).fits
    assert decision(plans, count) == (
        f"KV pages: {count:,} of 16 tokens ({16 * count:,} tokens), all the room there is on rank "
        "0, which has the least"
    )
    assert decision(plans, 7).endswith(
        "KV pages: 7 of 16 tokens (112 tokens), all that can be of use"
    )


def test_what_others_hold_of_a_card_is_no_room() -> None:
    free, held = (kimi(8).plan(0, replace(RTX, taken=taken)) for taken in (GIB, 4 * GIB))
    assert free.pages - held.pages == pytest.approx(3 * GIB / free.page_bytes, abs=1)
    with pytest.raises(ConfigError, match="rank 0 of 8 does not fit on RTX PRO 6000"):
        common_pages([kimi(8).plan(0, replace(RTX, taken=20 * GIB))], 100)


def test_ranks_of_different_room_take_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device="cpu", tp=3, max_requests=2)
    facts = open_facts(replace(config, tp=1))
    planned = planned_start(config, facts)
    cards = [holding(planned, rank, pages) for rank, pages in enumerate((90, 70, 80))]
    settled = on_ranks(
        cards, monkeypatch, lambda shard, both: settle_pages(config, facts, shard, both)
    )
    assert [one.num_pages for one in settled] == [70, 70, 70]
    assert not any(one.pages_by_room for one in settled)
    few = replace(facts, num_pages=12)
    settled = on_ranks(
        cards, monkeypatch, lambda shard, both: settle_pages(config, few, shard, both)
    )
    assert [one.num_pages for one in settled] == [12, 12, 12]


def test_all_ranks_refuse_alike_where_one_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device="cpu", tp=3, max_requests=2)
    facts = open_facts(replace(config, tp=1))
    cards = [Card("a host", 64 * GIB, taken) for taken in (0, 0, 64 * GIB)]

    def refusal(shard: Shard, collectives: ThreadCollectives) -> str:
        with pytest.raises(ConfigError) as caught:
            settle_pages(config, facts, shard, collectives)
        return str(caught.value)

    [said] = set(on_ranks(cards, monkeypatch, refusal))
    assert said.startswith("rank 2 of 3 does not fit on a host: it needs 64.")


def test_what_was_asked_for_needs_no_meeting() -> None:
    config = EngineConfig(device="cpu", tp=2, num_pages=9)
    facts = resolve(config)
    meeting = Meeting(2)  # nobody else comes
    assert settle_pages(config, facts, Shard(0, 2), ThreadCollectives(meeting, 0)) is facts


def test_pages_asked_for_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device="cpu", num_pages=41)
    facts = resolve(config)
    card = holding(planned_start(config, facts), 0, 40)
    monkeypatch.setattr(kv_room, "card_found", lambda device, ranks: card)
    with pytest.raises(ConfigError, match=r"--num-pages 40 \(num_pages, of 16 tokens\) would fit"):
        build_engine(config, facts)
    fitting = replace(config, num_pages=40)
    assert build_engine(fitting, resolve(fitting)).facts.num_pages == 40


def test_every_rank_knows_every_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Card("a host", 5 + (rank << 40), rank) for rank in range(3)]

    def gathered(shard: Shard, collectives: ThreadCollectives) -> list[Card]:
        return cards_of_all(cards[shard.rank], torch.device("cpu"), shard, collectives)

    assert on_ranks(cards, monkeypatch, gathered) == [cards] * 3


def test_ranks_hold_the_pages_that_they_settled_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device="cpu", tp=2, draft_tp=2, max_requests=2)
    facts = open_facts(config)
    planned = planned_start(config, facts)
    cards = [holding(planned, rank, pages) for rank, pages in enumerate((60, 50))]
    channel = QueueChannel(2)

    def held(shard: Shard, collectives: ThreadCollectives) -> list[int]:
        if shard.rank == 1:
            own = build_follower(config, facts, shard=shard, collectives=collectives)
            assert own.drafter is not None
            slots = own.drafter.cache[0].shape[0]
            return [own.verifier.cache.num_pages - SPARE_PAGES, slots // 16 - SPARE_PAGES]
        engine = build_engine(
            config,
            facts,
            shard=shard,
            collectives=collectives,
            make_group=lambda verifier: RankGroup(verifier, channel, collectives),
        )
        return [engine.facts.num_pages, engine.driver.scheduler.pages.num_pages]

    assert on_ranks(cards, monkeypatch, held) == [[50, 50], [50, 50]]


def test_an_engine_runs_in_what_it_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(device="cpu", max_requests=2)
    facts = open_facts(config)
    card = holding(planned_start(config, facts), 0, 20)
    monkeypatch.setattr(kv_room, "card_found", lambda device, ranks: card)
    with caplog.at_level(logging.INFO, "kdray"):
        engine = build_engine(config, facts)
    said = [record.getMessage() for record in caplog.records]
    assert "KV pages: 20 of 16 tokens (320 tokens), all the room there is" in said
    most = 320 - 16 - 16
    assert f"the most that one can take is {most} tokens" in "\n".join(said)
    for prompt, tokens in ((most - 8, 8), (5, 30), (40, 20)):
        request = make_request(
            f"{prompt}",
            range(3, 3 + prompt),
            SamplingParams(max_tokens=tokens, ignore_eos=True),
            engine.facts,
        )
        engine.driver.submit(request)
        while engine.driver.step() is not None:
            engine.driver.scheduler.pages.check()
        assert len(request.tokens) == prompt + tokens


def test_no_rank_is_built_before_its_pages_are_settled() -> None:
    config = EngineConfig(device="cpu")
    with pytest.raises(AssertionError, match="settle their pages first"):
        build_verifier(config, open_facts(config), load_ops("cpu"))
