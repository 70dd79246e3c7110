"""Device rounds over several ranks: what one rank says, plainly, whatever the rounds' sizes."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import islice

import numpy as np
import pytest
import torch

from jobs.traffic import Reply, Visit, demo_prompts, draw_visits, run_visits
from kdray.config import EngineConfig, SyntheticAcceptance
from kdray.core.plan import DraftTrees, RoundOrder, RunningRows
from kdray.driver.driver import Driver
from kdray.driver.turns import HostTurns, PromptTurns
from kdray.engine import build_engine, build_follower, resolve
from kdray.model.parallel import Shard
from kdray.profiling.recorder import Recorder
from kdray.verifier.follower import pack_round, unpack_round
from kdray.verifier.rank_group import RankGroup, RankWorker
from kdray.verifier.wire import Kind, StepHeader, decode, encode
from tests.thread_ranks import Meeting, QueueChannel, ThreadCollectives

LENGTH = 320


def config_of(**wishes: object) -> EngineConfig:
    wishes = {"max_requests": 4, "max_model_len": LENGTH, **wishes}
    return EngineConfig(device="cpu", **wishes)  # type: ignore[arg-type]


def visits_of(count: int) -> list[Visit]:
    prompts = demo_prompts(resolve(config_of()), each=3)
    fitting = [prompt for prompt in prompts if len(prompt) < LENGTH - 50]
    return list(islice(draw_visits(fitting, seed=5, most_tokens=24), count))


def stop_the_clock(driver: Driver) -> None:
    """It is everybody's turn: which steps there are is the same in every run."""
    driver.prompt_turns = PromptTurns(lambda: 0.0)
    driver.host_turns = HostTurns(lambda: 0.0)


def on_one_rank(config: EngineConfig, visits: list[Visit]) -> list[Reply]:
    engine = build_engine(config, resolve(config), runs_ahead=False)
    return run_visits(engine.driver, engine.facts, visits)


def on_ranks(
    config: EngineConfig, visits: list[Visit], *, runs_ahead: bool = True
) -> tuple[list[Reply], Driver]:
    """The replies, and rank 0's driver; the others have done as many steps."""
    tp = config.tp
    meeting, channel = Meeting(tp), QueueChannel(tp)
    collectives = [ThreadCollectives(meeting, rank) for rank in range(tp)]
    facts = resolve(config)

    def follow(rank: int) -> int:
        threading.current_thread().name = f"rank-{rank}"
        own = build_follower(
            config,
            facts,
            shard=Shard(rank, tp),
            collectives=collectives[rank],
            runs_ahead=runs_ahead,
        )
        receiver, cpu = channel.receiver(rank), torch.device("cpu")
        worker = RankWorker(
            own.verifier,
            receiver,
            collectives[rank],
            cpu,
            Recorder(rank),
            rounds=own.rounds,
            drafter=own.drafter,
        )
        return worker.run()

    with ThreadPoolExecutor(tp - 1) as pool:
        others: list[Future[int]] = [pool.submit(follow, rank) for rank in range(1, tp)]
        engine = build_engine(
            config,
            facts,
            shard=Shard(0, tp),
            collectives=collectives[0],
            make_group=lambda verifier: RankGroup(verifier, channel, collectives[0]),
            runs_ahead=runs_ahead,
        )
        stop_the_clock(engine.driver)
        replies = run_visits(engine.driver, engine.facts, visits)
        engine.driver.close()
        assert (engine.driver.clock.seconds["launch"] > 0) == runs_ahead
        assert engine.driver.scheduler.pages.num_used == 0
        assert {other.result() for other in others} == {engine.driver.counters.steps}
        return replies, engine.driver


@pytest.mark.parametrize(
    "wishes",
    [
        {"budget": 16},
        {"budget": 16, "draft_tp": 1},
        {"budget": 16, "draft_weights": "int4"},
        {"mode": "chain", "budget": 7, "page_size": 1},
        {"mode": "plain"},
        {"budget": 8, "prefill_chunk": 7, "num_pages": 60},
        {"budget": 5, "max_requests": 3, "tp": 4},
    ],
    ids=str,
)
def test_ranks_that_run_ahead_together_say_what_one_says(wishes: dict[str, object]) -> None:
    visits = [replace(visit, patience=None) for visit in visits_of(10)]
    config = config_of(**{"tp": 2, **wishes})
    replies, _ = on_ranks(config, visits)
    assert replies == on_one_rank(config_of(mode="plain"), visits)


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("mode", ["tree", "chain"])
def test_ranks_that_share_the_drafter_draft_as_one_that_drafts_alone(
    mode: str, runs_ahead: bool
) -> None:
    """The same trees in the same steps, whoever made them: accept lengths tell."""
    visits = [replace(visit, patience=None) for visit in visits_of(8)]
    config = config_of(tp=2, mode=mode, budget=7, prefill_chunk=48)
    assert resolve(config).draft_ranks == 2
    shared, together = on_ranks(config, visits, runs_ahead=runs_ahead)
    alone, one = on_ranks(replace(config, draft_tp=1), visits, runs_ahead=runs_ahead)
    assert shared == alone
    assert together.counters == one.counters
    assert max(together.counters.accept_lengths) > 4


def test_ranks_that_assume_their_acceptance_assume_the_same() -> None:
    rates = SyntheticAcceptance(hits=(0.8, 0.6))
    config = config_of(budget=12, synthetic_acceptance=rates, tp=2)
    visits = [replace(visit, patience=None) for visit in visits_of(10)]
    alone_config = replace(config, tp=1)
    alone = build_engine(alone_config, resolve(alone_config))
    stop_the_clock(alone.driver)
    replies, _ = on_ranks(config, visits)
    assert replies == run_visits(alone.driver, alone.facts, visits)


@pytest.mark.parametrize("requests", [1, 3])
def test_a_round_survives_its_broadcast(requests: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def ints(*shape: int) -> torch.Tensor:
        return torch.randint(-9, 99, shape, dtype=torch.int32, generator=generator)

    nodes, words = 34, 2
    trees = DraftTrees(
        token=ints(requests, nodes),
        parent=ints(requests, nodes),
        depth=ints(requests, nodes),
        score=ints(requests, nodes),
        mask=ints(requests, nodes, words),
        num_nodes=ints(requests),
    )
    rows = RunningRows(
        slot=ints(requests),
        root=trees.token[:, 0],
        root_position=ints(requests),
        page_table=ints(requests, 3),
        page_size=16,
        temperature=torch.rand(requests, generator=generator),
        top_k=ints(requests),
        top_p=torch.rand(requests, dtype=torch.float64, generator=generator),
        min_p=torch.rand(requests, dtype=torch.float64, generator=generator),
        seed=torch.randint(0, 1 << 62, (requests,), generator=generator),
    )
    position = ints(requests, nodes)
    packed = pack_round(trees, position, rows)
    back, places, same = unpack_round(packed, rows.slot, nodes, words, rows.page_table, 16)
    for name in ("token", "parent", "depth", "mask", "num_nodes"):
        assert torch.equal(getattr(back, name), getattr(trees, name)), name
    assert torch.equal(places, position)
    for field in fields(RunningRows):
        mine, other = getattr(rows, field.name), getattr(same, field.name)
        assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other


def test_an_order_survives_the_wire() -> None:
    order = RoundOrder(
        size=(4, 17),
        slot=np.array([2, 0, -1, -1], dtype=np.int32),
        tables=((2, np.arange(5, dtype=np.int32)), (0, np.array([9], dtype=np.int32))),
    )
    header = StepHeader(kind=Kind.ROUND, plan=None, commit_width=8, round=order)
    back = decode(encode(header))
    assert back.kind is Kind.ROUND and back.commit_width == 8 and back.commits
    assert back.round is not None and back.round.size == order.size
    assert np.array_equal(back.round.slot, order.slot)
    for (slot, pages), (other, others) in zip(back.round.tables, order.tables, strict=True):
        assert slot == other and np.array_equal(pages, others)
    bare = decode(encode(replace(header, round=replace(order, tables=()))))
    assert bare.round is not None and bare.round.tables == ()
    with pytest.raises(ValueError, match="wrong length"):
        decode(encode(header)[:-4])
