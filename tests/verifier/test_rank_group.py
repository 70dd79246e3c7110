"""A group of ranks against one rank: same tokens, and the same KV on every rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kdray.core.request import SamplingParams
from kdray.engine import assemble, build_verifier, resolve
from kdray.kernels.ops import load_ops
from kdray.model.parallel import Shard
from kdray.profiling.recorder import Recorder
from kdray.verifier.rank_group import RankGroup, RankWorker
from tests.harness import drain, model_config, outputs_of, run, submit
from tests.model import tiny
from tests.oracle_drafter import OracleDrafter
from tests.thread_ranks import Meeting, QueueChannel, ThreadCollectives

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [10] * 33, list(range(3, 40))]
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=20, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_plain(tmp_path_factory.mktemp("wide"), "wide_tp")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_that_share_the_model_say_what_one_says(folder: Path, tp: int, sampling: str) -> None:
    params = SAMPLINGS[sampling]
    config = model_config(folder, page_size=4, max_requests=3, budget=8)
    plain, _ = run(config, PROMPTS, params)
    facts = resolve(replace(config, drafter="none"))
    ops = load_ops("cpu")
    meeting, channel = Meeting(tp), QueueChannel(tp)
    collectives = [ThreadCollectives(meeting, rank) for rank in range(tp)]
    verifiers = [
        build_verifier(config, facts, ops, shard=Shard(rank, tp), collectives=collectives[rank])
        for rank in range(tp)
    ]
    oracle = OracleDrafter(
        {f"r{n}": [*PROMPTS[n], *plain[n]] for n in range(len(PROMPTS))},
        depth=5,
        candidates=4,
        vocab_size=96,
        accuracy=0.6,
    )
    group = RankGroup(verifiers[0], channel, collectives[0])
    engine = assemble(config, facts, ops, oracle, group)
    with ThreadPoolExecutor(tp - 1) as pool:
        workers = [
            pool.submit(_follow, verifiers[rank], channel, collectives[rank], rank)
            for rank in range(1, tp)
        ]
        requests = submit(engine, PROMPTS, params)
        drain(engine.driver)
        engine.driver.close()
        steps = {worker.result() for worker in workers}
    assert outputs_of(requests) == plain
    assert steps == {engine.driver.counters.steps}
    assert max(engine.driver.counters.accept_lengths) > 2
    for verifier in verifiers[1:]:
        for mine, first in zip(verifier.cache.layers, verifiers[0].cache.layers, strict=True):
            assert torch.equal(mine, first)


def _follow(
    verifier: object, channel: QueueChannel, collectives: ThreadCollectives, rank: int
) -> int:
    threading.current_thread().name = f"rank-{rank}"
    receiver = channel.receiver(rank)
    cpu = torch.device("cpu")
    worker = RankWorker(verifier, receiver, collectives, cpu, Recorder(rank))  # type: ignore[arg-type]
    return worker.run()
