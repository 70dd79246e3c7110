"""Two ranks on two GPUs over NCCL: captured rounds of both against one GPU and the host's steps."""

from __future__ import annotations

import tempfile
from itertools import islice
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch

from jobs.traffic import Reply, Visit, demo_prompts, draw_visits, run_visits
from kdray.config import EngineConfig
from kdray.engine import build_engine, build_follower, resolve
from kdray.model.parallel import Shard
from kdray.profiling.recorder import Recorder
from kdray.verifier.channel import ZmqReceiver, ZmqSender
from kdray.verifier.collectives import TorchCollectives
from kdray.verifier.rank_group import RankGroup, RankWorker
from tests.gpu.near_ties import check_same
from tests.gpu.two_gpus import HOST, WAIT_S, run_both

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

COUNT = 40


def visits_of() -> list[Visit]:
    prompts = demo_prompts(resolve(EngineConfig(device="cuda")))
    return list(islice(draw_visits(prompts, seed=7, most_tokens=64), COUNT))


def config_of(**wishes: object) -> EngineConfig:
    return EngineConfig(device="cuda", dtype="float32", tp=2, **wishes)  # type: ignore[arg-type]


def be_rank(
    rank: int, port: int, config: EngineConfig, endpoint: str, replies: SimpleQueue[list[Reply]]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    facts, shard = resolve(config), Shard(rank, 2)
    collectives = TorchCollectives(
        rank=rank, size=2, host=HOST, port=port, device=torch.device("cuda", 0), timeout_s=WAIT_S
    )
    collectives.prove()
    if rank == 1:
        own = build_follower(config, facts, shard=shard, collectives=collectives)
        assert (own.rounds is not None) == config.graphs
        assert (own.drafter is not None) == (config.draft_tp != 1 and config.mode != "plain")
        worker = RankWorker(
            own.verifier,
            ZmqReceiver(endpoint),
            collectives,
            facts.device,
            Recorder(1),
            rounds=own.rounds,
            drafter=own.drafter,
        )
        worker.run()
        del worker, own  # with their graphs, or closing waits for ever
    else:
        sender = ZmqSender([endpoint], timeout_s=WAIT_S)
        engine = build_engine(
            config,
            facts,
            shard=shard,
            collectives=collectives,
            make_group=lambda verifier: RankGroup(verifier, sender, collectives),
        )
        replies.put(run_visits(engine.driver, engine.facts, visits_of()))
        engine.driver.close()
        del engine
    torch.cuda.synchronize()
    collectives.close()


def on_two_gpus(config: EngineConfig) -> list[Reply]:
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'rank-1'}"
        [replies] = run_both(be_rank, config, endpoint)
    return list(replies)


@pytest.fixture(scope="module")
def plainly() -> list[Reply]:
    config = EngineConfig(device="cuda", dtype="float32", mode="plain", graphs=False)
    engine = build_engine(config, resolve(config))
    return run_visits(engine.driver, engine.facts, visits_of())


@pytest.mark.parametrize("wishes", [
    {"budget": 16}, {"mode": "chain", "budget": 7}, {"mode": "plain"}, {"graphs": False},
    {"draft_tp": 1},
], ids=str)  # fmt: skip
def test_two_gpus_say_what_one_says_plainly(
    plainly: list[Reply], wishes: dict[str, object]
) -> None:
    replies = on_two_gpus(config_of(**wishes))
    for visit, mine, other in zip(visits_of(), replies, plainly, strict=True):
        check_same(visit, mine, other)
