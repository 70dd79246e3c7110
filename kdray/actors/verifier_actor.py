"""Every rank but 0: a verifier that follows rank 0 step by step."""

from __future__ import annotations

import ray
import torch

from kdray.actors.processes import RankProcess, own_process
from kdray.actors.rendezvous import Rendezvous
from kdray.config import EngineConfig
from kdray.engine import build_follower, resolve
from kdray.logs import show_logs
from kdray.model.parallel import Shard
from kdray.profiling.recorder import Recorder
from kdray.verifier.channel import ZmqReceiver
from kdray.verifier.collectives import TorchCollectives
from kdray.verifier.heartbeat import Heartbeat
from kdray.verifier.rank_group import RankWorker

CONTROL = "control"  # the concurrency group of calls that are answered while run() goes on


class VerifierActor:
    """start() loads the shard; run() is entered once and left at the end."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        show_logs()
        self._config = config
        self._rank = rank
        self._worker: RankWorker | None = None

    def hello(self) -> RankProcess:
        """Who runs here; asked before anything is loaded."""
        node_id = ray.get_runtime_context().get_node_id()
        return own_process(self._rank, node_id, on_gpu=self._config.device == "cuda")

    def start(self, rendezvous: Rendezvous) -> None:
        """Meet the other ranks and load this rank's shard."""
        config, rank = self._config, self._rank
        facts = resolve(config)
        torch.set_num_threads(facts.threads)
        collectives = TorchCollectives(
            rank=rank,
            size=config.tp,
            host=rendezvous.host,
            port=rendezvous.port,
            device=facts.device,
            timeout_s=config.step_timeout_s,
        )
        collectives.prove(in_rank_order=config.batch_invariant)
        own = build_follower(config, facts, shard=Shard(rank, config.tp), collectives=collectives)
        beat = Heartbeat(rendezvous.heartbeat(rank)).beat
        receiver = ZmqReceiver(rendezvous.endpoint(rank), idle=beat)
        self._worker = RankWorker(
            own.verifier,
            receiver,
            collectives,
            facts.device,
            Recorder(rank),
            beat,
            rounds=own.rounds,
            drafter=own.drafter,
        )

    @ray.method(concurrency_group=CONTROL)
    def steps(self) -> int:
        """Steps done so far; answers while one of them hangs."""
        return self._worker.steps if self._worker is not None else 0

    def run(self) -> int:
        """Steps until rank 0 says stop; returns how many."""
        assert self._worker is not None, "start comes before run"
        return self._worker.run()
