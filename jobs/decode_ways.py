"""The same requests decoded in several ways: on one device, or over ranks, a process each."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from own_gpu import own_gpu
from traffic import Reply, Visit, run_visits

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.driver.driver import Driver
from kdray.engine import Engine, assemble, build_engine, build_follower, resolve
from kdray.errors import KdrayError
from kdray.kernels.ops import load_ops
from kdray.memory_plan import SPARE_PAGES
from kdray.model.parallel import Shard
from kdray.model.target import TargetModel
from kdray.profiling.recorder import Recorder
from kdray.verifier.channel import ZmqReceiver, ZmqSender
from kdray.verifier.collectives import TorchCollectives, open_store
from kdray.verifier.local_group import LocalGroup
from kdray.verifier.rank_group import RankGroup, RankWorker
from kdray.verifier.verifier import Verifier

HOST = "127.0.0.1"
WAIT_S = 300.0
TEMPERATURES = (0.0, 0.8, 0.0, 1.5)


@dataclass(frozen=True, slots=True)
class Decoded:
    """accept_length: mean of speculative steps, 1 where there are none; seconds: of decoding."""

    replies: list[Reply]
    accept_length: float
    seconds: float


def draw_visits(tokens: Sequence[int], *, count: int, length: int, seed: int) -> list[Visit]:
    """Prompts of these tokens; half of the visits are greedy. They come apart and end apart, so
    that rounds of every size are met, with rows of padding."""
    dice = random.Random(seed)
    return [
        Visit(
            prompt=tuple(dice.choices(tokens, k=dice.randint(3, 14))),
            sampling=SamplingParams(
                max_tokens=dice.randint(max(1, length // 2), length),
                temperature=TEMPERATURES[n % len(TEMPERATURES)],
                seed=dice.getrandbits(62),
                ignore_eos=True,
            ),
            pause=n % 3,
            patience=None,
        )
        for n in range(count)
    ]


def runs_ahead(config: EngineConfig) -> bool | None:
    """Device rounds on a CPU too, where they are no graphs."""
    return True if config.device == "cpu" else None


def build_alone(config: EngineConfig) -> tuple[Engine, Verifier]:
    """An engine of one rank, and its verifier."""
    kept: list[Verifier] = []

    def group_of(verifier: Verifier) -> LocalGroup:
        kept.append(verifier)
        return LocalGroup(verifier)

    facts = resolve(config)
    engine = build_engine(config, facts, make_group=group_of, runs_ahead=runs_ahead(config))
    return engine, kept[0]


def plain_engine(config: EngineConfig, verifier: Verifier) -> Engine:
    """Plain decoding, step by step from the host and launched kernel by kernel, with what a
    verifier of another engine has left."""
    config = replace(config, mode="plain", tp=1, draft_tp=None, graphs=False)
    pages = verifier.cache.num_pages - SPARE_PAGES
    facts = resolve(replace(config, num_pages=pages))
    ops = load_ops(facts.device, batch_invariant=config.batch_invariant)
    launching = Verifier(verifier.model, verifier.cache, ops)
    return assemble(config, facts, ops, None, LocalGroup(launching))


def decode(engine: Engine, visits: Sequence[Visit]) -> Decoded:
    start = time.perf_counter()
    replies = run_visits(engine.driver, engine.facts, visits)
    return Decoded(replies, accept_length(engine.driver), time.perf_counter() - start)


def accept_length(driver: Driver) -> float:
    lengths = driver.counters.accept_lengths
    return sum(n * times for n, times in lengths.items()) / max(1, lengths.total()) or 1.0


def decode_on_ranks(
    config: EngineConfig, visits: Sequence[Visit], after: Callable[[TargetModel], None]
) -> Decoded:
    """By config.tp ranks, a process each, on a GPU each or on the CPU.

    after: what every rank does with its model in the end, for instance forward passes
    """
    decoded: list[Decoded] = []
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(
            config.tp, _be_rank, config, Path(folder), list(visits), after, hear=decoded.append
        )
    return decoded[0]


def run_ranks(
    size: int, be_rank: Callable[..., None], *args: object, hear: Callable[[Any], object]
) -> None:
    """be_rank(rank, port, *args, said) in so many processes; hear: what they put into `said`.

    KdrayError where one does not end well.
    """
    context = multiprocessing.get_context("spawn")
    store, port = open_store(HOST, WAIT_S)  # held until all have met
    said = context.SimpleQueue()
    ranks = [
        context.Process(target=be_rank, args=(rank, port, *args, said)) for rank in range(size)
    ]
    for number, rank in enumerate(ranks):
        with own_gpu(number):
            rank.start()
    deadline = time.monotonic() + WAIT_S
    running = True
    while running and time.monotonic() < deadline:
        ends = [rank.exitcode for rank in ranks]
        running = None in ends and not any(ends)  # where one failed the others would wait for it
        time.sleep(0.02)
        while not said.empty():
            hear(said.get())
    for rank in ranks:
        rank.kill()
        rank.join()
    del store
    if ends != [0] * size:
        raise KdrayError(f"ranks ended with {ends}: 0 is well, None was waited for in vain")


def _be_rank(
    rank: int,
    port: int,
    config: EngineConfig,
    folder: Path,
    visits: list[Visit],
    after: Callable[[TargetModel], None],
    said: SimpleQueue[Decoded],
) -> None:
    set_up(config)
    facts, shard = resolve(config), Shard(rank, config.tp)
    collectives = TorchCollectives(
        rank=rank, size=config.tp, host=HOST, port=port, device=facts.device, timeout_s=WAIT_S
    )
    collectives.prove(in_rank_order=config.batch_invariant)
    endpoints = [f"ipc://{folder / f'rank-{other}'}" for other in range(1, config.tp)]
    if rank > 0:
        own = build_follower(
            config, facts, shard=shard, collectives=collectives, runs_ahead=runs_ahead(config)
        )
        receiver = ZmqReceiver(endpoints[rank - 1])
        RankWorker(
            own.verifier,
            receiver,
            collectives,
            facts.device,
            Recorder(rank),
            rounds=own.rounds,
            drafter=own.drafter,
        ).run()
        model = own.verifier.model
        del own  # with its graphs, or closing waits for ever
    else:
        sender = ZmqSender(endpoints, timeout_s=WAIT_S)
        kept: list[Verifier] = []

        def group_of(verifier: Verifier) -> RankGroup:
            kept.append(verifier)
            return RankGroup(verifier, sender, collectives)

        engine = build_engine(
            config,
            facts,
            shard=shard,
            collectives=collectives,
            make_group=group_of,
            runs_ahead=runs_ahead(config),
        )
        model = kept.pop().model
        said.put(decode(engine, visits))
        engine.driver.close()
        del engine
    after(model)
    if facts.device.type == "cuda":
        torch.cuda.synchronize()
    collectives.close()


def set_up(config: EngineConfig) -> None:
    """This process is a rank's, and sees its GPU alone."""
    torch.set_num_threads(config.threads or 1)
    torch.backends.cuda.matmul.allow_tf32 = False
