"""Rank 0: the driver and its own verifier in one process, and the face other processes call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

import ray
import torch

from kdray.actors.processes import RankProcess, own_process
from kdray.actors.profile_desk import ProfileDesk
from kdray.actors.rendezvous import Rendezvous, make_folder, remove_folder
from kdray.config import EngineConfig
from kdray.core.profile import ProfileOptions
from kdray.core.request import SamplingParams
from kdray.driver.scheduler import RequestOutput
from kdray.driver.step_loop import StepLoop
from kdray.driver.watch import Pulse, StepWatch
from kdray.engine import Engine, build_engine, make_request, resolve
from kdray.errors import EngineClosed
from kdray.logs import show_logs
from kdray.model.parallel import Collectives, Shard, SoloCollectives
from kdray.profiling.store import ProfileStore
from kdray.verifier.channel import ZmqSender
from kdray.verifier.collectives import TorchCollectives, open_store
from kdray.verifier.heartbeat import heartbeat_age
from kdray.verifier.local_group import LocalGroup
from kdray.verifier.rank_group import RankGroup
from kdray.verifier.verifier import Verifier

# One entry a request: id, tokens, accept length, finish reason, error.
StepMessage = list[tuple[str, tuple[int, ...], int | None, str | None, str | None]]
_STOP_TIMEOUT_S = 10.0
_LOOPBACK = "127.0.0.1"


class DriverActor:
    """An asyncio actor: calls are answered while the step loop runs in a thread of its own."""

    def __init__(self, config: EngineConfig) -> None:
        show_logs()
        self._config = config
        self._store: object = None  # held open while ranks may still come
        self._rendezvous: Rendezvous | None = None
        self._collectives: TorchCollectives | None = None
        self._engine: Engine | None = None
        self._loop: StepLoop | None = None
        self._subscribers: set[asyncio.Queue[StepMessage | None]] = set()
        self._desk: ProfileDesk | None = None
        self._ended = asyncio.Event()

    async def hello(self) -> RankProcess:
        """Who runs here; asked before anything is loaded."""
        node_id = ray.get_runtime_context().get_node_id()
        return own_process(0, node_id, on_gpu=self._config.device == "cuda")

    async def open_rendezvous(self) -> Rendezvous:
        """The place where all ranks meet; on one host, so over the loopback."""
        self._store, port = open_store(_LOOPBACK, self._config.start_timeout_s)
        self._rendezvous = Rendezvous(host=_LOOPBACK, port=port, folder=make_folder())
        return self._rendezvous

    async def start(self) -> dict[str, Any]:
        """Load the model and begin to step; returns info(). Raises what went wrong."""
        calls = asyncio.get_running_loop()

        def emit(outputs: list[RequestOutput]) -> None:
            calls.call_soon_threadsafe(self._publish, outputs)

        def on_end() -> None:
            calls.call_soon_threadsafe(self._end_streams)

        self._loop = StepLoop(self._build, emit, on_end, StepWatch(self._config.faults))
        self._loop.start()
        await asyncio.wrap_future(self._loop.ready)
        store = ProfileStore.at(self._config.profile_folder)
        self._desk = ProfileDesk(self._loop, store, self._config.tp)
        return await self.info()

    async def info(self) -> dict[str, Any]:
        """What callers need to know of the engine: plain values only."""
        engine = self._running_engine()
        facts, speculation = engine.facts, engine.speculation
        rates = self._config.synthetic_acceptance
        return {
            "name": facts.name,
            "model_folder": str(facts.target),
            "load_format": self._config.load_format,
            "synthetic_acceptance": asdict(rates) if rates and facts.acceptance else None,
            "max_model_len": facts.max_model_len,
            "vocab_size": facts.model.vocab_size,
            "end_token_ids": sorted(facts.model.eos_token_ids),
            "mode": speculation.mode,
            "budget": speculation.budget,
            "ranks": self._config.tp,
            "device": facts.device.type,
            "dtype": str(facts.dtype).removeprefix("torch."),
            "page_size": self._config.page_size,
            "num_pages": facts.num_pages,
            "pid": os.getpid(),
        }

    async def submit(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        delivered: tuple[int, ...] = (),
    ) -> None:
        """Queue a request. Raises InvalidRequest, EngineClosed or RankFailed.

        delivered: output that a driver before this one gave already (kdray.engine.make_request).
        """
        engine = self._running_engine()
        request = make_request(request_id, prompt, sampling, engine.facts, delivered)
        self._step_loop().submit(request)

    async def abort(self, request_id: str) -> None:
        self._step_loop().abort(request_id)

    async def pulse(self) -> Pulse:
        """How the steps get on; answers while one of them hangs."""
        return self._step_loop().pulse()

    async def ended(self) -> str | None:
        """Returns when the steps have ended: None by stop(), else why they failed."""
        await self._ended.wait()
        failure = self._step_loop().failure
        return None if failure is None else f"{type(failure).__name__}: {failure}"

    async def stats(self) -> dict[str, Any]:
        loop = self._step_loop()
        return asdict(replace(loop.stats(), rank_ages_s=self._rank_ages(loop)))

    async def start_profile(self, options: ProfileOptions) -> dict[str, Any]:
        """Record all ranks from the next step on. Raises ConfigError or ProfileConflict."""
        on_gpu = self._running_engine().facts.device.type == "cuda"
        options = options.resolved(on_gpu=on_gpu, under_nsight=self._config.nsight)
        return self._profiles().start(options)

    async def stop_profile(self) -> dict[str, Any]:
        """End it and wait for its files. Raises ProfileConflict where none was started."""
        return await self._profiles().stop()

    async def profiles(self) -> list[str]:
        return self._profiles().names()

    async def profile_status(self, name: str) -> dict[str, Any]:
        """Raises KeyError where there is no such profile."""
        return self._profiles().status(name)

    async def profile_file(self, name: str, file: str) -> bytes:
        """Raises KeyError where there is no such file."""
        return await asyncio.to_thread(self._profiles().read, name, file)

    async def outputs(self) -> AsyncIterator[StepMessage]:
        """An empty message, and from then on one a step, for all requests, to the end.

        Who submits before the empty one has come may miss outputs: Ray may run the later call
        first. Ends quietly after stop(); raises the cause where the engine failed.
        """
        messages: asyncio.Queue[StepMessage | None] = asyncio.Queue()
        self._subscribers.add(messages)
        try:
            if self._step_loop().failure is not None:
                messages.put_nowait(None)
            yield []
            while (message := await messages.get()) is not None:
                yield message
        finally:
            self._subscribers.discard(messages)
        failure = self._step_loop().failure
        if failure is not None:
            raise failure

    async def stop(self) -> None:
        """End the step loop and tell the other ranks. Idempotent."""
        if self._loop is not None:
            await asyncio.to_thread(self._loop.close, _STOP_TIMEOUT_S)
        if self._rendezvous is not None:
            remove_folder(self._rendezvous.folder)

    def _build(self) -> Engine:
        """In the step loop's thread, so that threads and devices are set where they are used."""
        config = self._config
        facts = resolve(config)
        torch.set_num_threads(facts.threads)
        collectives = self._meet(facts.device)
        self._engine = build_engine(
            config,
            facts,
            shard=Shard(0, config.tp),
            collectives=collectives,
            make_group=lambda verifier: self._group(verifier, collectives),
        )
        return self._engine

    def _meet(self, device: torch.device) -> Collectives:
        config, rendezvous = self._config, self._rendezvous
        if config.tp == 1 or rendezvous is None:
            return SoloCollectives()
        self._collectives = TorchCollectives(
            rank=0,
            size=config.tp,
            host=rendezvous.host,
            port=rendezvous.port,
            device=device,
            timeout_s=config.step_timeout_s,
        )
        self._collectives.prove(in_rank_order=config.batch_invariant)
        return self._collectives

    def _group(self, verifier: Verifier, collectives: Collectives) -> LocalGroup | RankGroup:
        config, rendezvous = self._config, self._rendezvous
        if config.tp == 1 or rendezvous is None:
            return LocalGroup(verifier)
        endpoints = [rendezvous.endpoint(rank) for rank in range(1, config.tp)]
        sender = ZmqSender(endpoints, timeout_s=config.step_timeout_s)
        return RankGroup(verifier, sender, collectives)

    def _rank_ages(self, loop: StepLoop) -> dict[int, float]:
        """Between two steps rank 0 is as alive as its answer."""
        ages: dict[int, float | None] = {0: loop.pulse().in_step_s or 0.0}
        if self._rendezvous is not None:
            paths = {rank: self._rendezvous.heartbeat(rank) for rank in range(1, self._config.tp)}
            ages |= {rank: heartbeat_age(path) for rank, path in paths.items()}
        return {rank: age for rank, age in ages.items() if age is not None}

    def _publish(self, outputs: list[RequestOutput]) -> None:
        message = [
            (o.request_id, o.token_ids, o.accept_length, o.finish_reason, o.error) for o in outputs
        ]
        for subscriber in self._subscribers:
            subscriber.put_nowait(message)

    def _end_streams(self) -> None:
        self._ended.set()
        for subscriber in self._subscribers:
            subscriber.put_nowait(None)

    def _step_loop(self) -> StepLoop:
        if self._loop is None:
            raise EngineClosed("the engine has not been started")
        return self._loop

    def _profiles(self) -> ProfileDesk:
        if self._desk is None:
            raise EngineClosed("the engine has not been started")
        return self._desk

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise EngineClosed("the engine has not been started")
        return self._engine
