"""Real gangs that are killed, stopped and broken under real requests: the text is the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from kdray.actors.supervised import SupervisedEngine
from kdray.config import EngineConfig, FaultPolicy
from kdray.core.request import SamplingParams
from kdray.errors import CheckpointError, EngineClosed, PlacementError
from kdray.serve.replay import ReplayingClient
from tests.actors.test_gang import alive, wait_until_gone
from tests.harness import model_config, run
from tests.model import tiny

# Long enough that a fault always falls into them; the seedless one gets its seed from the client.
LONG = SamplingParams(max_tokens=230, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [10] * 20]
SAMPLINGS = [
    LONG,
    replace(LONG, temperature=0.8, seed=3),
    replace(LONG, temperature=0.7, seed=5, presence_penalty=0.4, repetition_penalty=1.2),
]
# A hang lasts for ever, so no deadline can be too short for it; sound steps take milliseconds.
QUICK = FaultPolicy(
    step_floor_s=8.0, start_steps=0, pulse_every_s=0.2, pulse_timeout_s=8.0, backoff_s=0.1
)

pytestmark = pytest.mark.usefixtures("ray_cluster")
Fault = Callable[[dict[int, int]], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_plain(tmp_path_factory.mktemp("wide"), "wide_tp")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[list[int]]:
    return run(model_config(folder, page_size=4, max_requests=2), PROMPTS, SAMPLINGS)[0]


def config_of(folder: Path, **policy: object) -> EngineConfig:
    faults = replace(QUICK, **policy)  # type: ignore[arg-type]
    return model_config(folder, page_size=4, max_requests=2, tp=2, faults=faults)


@pytest.fixture(scope="class")
def engine(folder: Path) -> Iterator[SupervisedEngine]:
    """Two ranks, two requests at a time: the third one waits when a fault comes.

    One engine for many faults, each of which leaves it up again; none counts for the next.
    """
    engine = SupervisedEngine.start(config_of(folder, window_s=1.0))
    yield engine
    pids = ray.get(engine.supervisor.pids.remote())
    engine.stop()
    wait_until_gone(pids.values())


def scenario(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(200):
            await work()

    asyncio.run(bounded())


async def read(client: ReplayingClient, name: str, on_step: Callable[[int], None]) -> list[int]:
    tokens: list[int] = []
    async for delta in client.outputs(name):
        assert delta.error is None
        tokens += delta.token_ids
        on_step(len(tokens))
    return tokens


def kill(rank: int) -> Fault:
    return lambda pids: os.kill(pids[rank], signal.SIGKILL)


def hang(rank: int) -> Fault:
    return lambda pids: os.kill(pids[rank], signal.SIGSTOP)


FAULTS = {"rank": kill(1), "driver": kill(0), "hung rank": hang(1), "hung driver": hang(0)}


class TestOneEngine:
    """Through one fault after another."""

    @pytest.mark.parametrize("fault", FAULTS)
    def test_every_request_ends_as_if_nothing_had_happened(
        self, engine: SupervisedEngine, undisturbed: list[list[int]], fault: str
    ) -> None:
        async def work() -> None:
            client = await ReplayingClient.connect(engine.supervisor)
            pids = await engine.supervisor.pids.remote()
            done = asyncio.Event()

            def on_step(count: int) -> None:
                if count >= 20 and not done.is_set():
                    done.set()
                    FAULTS[fault](pids)

            for n, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
                await client.submit(f"r{n}", prompt, sampling)
            texts = await asyncio.gather(*(read(client, f"r{n}", on_step) for n in range(3)))
            assert texts == undisturbed
            assert client.healthy() is None
            totals = client.events.totals()
            assert (totals["restarts_total"], totals["replayed_requests_total"]) == (1, 3)
            assert totals["watchdog_expirations_total"] == fault.startswith("hung")
            later = await engine.supervisor.pids.remote()
            assert set(later.values()).isdisjoint(pids.values())
            assert not any(map(alive, pids.values()))
            await client.close()

        scenario(work)

    def test_an_idle_engine_comes_back_and_takes_requests_meanwhile(
        self, engine: SupervisedEngine, undisturbed: list[list[int]]
    ) -> None:
        async def work() -> None:
            client = await ReplayingClient.connect(engine.supervisor)
            for rank in (1, 0):
                pids = await engine.supervisor.pids.remote()
                os.kill(pids[rank], signal.SIGKILL)
                await client.submit(f"after {rank}", PROMPTS[0], SAMPLINGS[0])
                assert await read(client, f"after {rank}", lambda count: None) == undisturbed[0]
            assert client.events.totals()["restarts_total"] == 2
            await client.close()

        scenario(work)

    def test_a_request_without_a_seed_keeps_the_one_it_was_given(
        self, engine: SupervisedEngine
    ) -> None:
        async def work() -> None:
            client = await ReplayingClient.connect(engine.supervisor)
            pids = await engine.supervisor.pids.remote()
            drawn = replace(LONG, temperature=1.0)
            await client.submit("a", PROMPTS[0], drawn)
            seed = client._open["a"].sampling.seed
            tokens = await read(client, "a", lambda n: kill(1)(pids) if n == 20 else None)
            await client.submit("b", PROMPTS[0], replace(drawn, seed=seed))
            assert await read(client, "b", lambda count: None) == tokens
            await client.close()

        scenario(work)


def test_when_restarts_are_spent_all_hear_the_cause(folder: Path) -> None:
    engine = SupervisedEngine.start(config_of(folder, max_restarts=1))

    async def work() -> None:
        client = await ReplayingClient.connect(engine.supervisor)
        killed: list[int] = []

        def kill_twice(count: int) -> None:
            if count in (20, 120) and count not in killed:
                killed.append(count)
                pids = ray.get(engine.supervisor.pids.remote())
                os.kill(pids[1], signal.SIGKILL)

        await client.submit("a", PROMPTS[0], LONG)
        with pytest.raises(EngineClosed, match=r"process of rank 1 ended.*after 1 restarts"):
            await read(client, "a", kill_twice)
        assert killed == [20, 120]
        assert "rank 1" in str(client.healthy())
        with pytest.raises(EngineClosed, match="rank 1"):
            await client.submit("b", PROMPTS[0], LONG)
        with pytest.raises(EngineClosed, match="rank 1"):
            await client.stats()
        await client.close()

    scenario(work)
    wait_until_gone()  # an engine that was given up holds nothing
    engine.stop()


def test_a_stopped_engine_says_so(folder: Path) -> None:
    engine = SupervisedEngine.start(config_of(folder))

    async def work() -> None:
        client = await ReplayingClient.connect(engine.supervisor)
        await client.submit("a", PROMPTS[0], LONG)
        await asyncio.to_thread(engine.stop)
        with pytest.raises(EngineClosed):
            await read(client, "a", lambda count: None)
        assert client.healthy() is not None
        await client.close()

    scenario(work)
    wait_until_gone()


def test_ranks_do_not_outlive_their_supervisor(folder: Path) -> None:
    engine = SupervisedEngine.start(config_of(folder))
    pids = ray.get(engine.supervisor.pids.remote())

    async def work() -> None:
        client = await ReplayingClient.connect(engine.supervisor)
        await client.submit("a", PROMPTS[0], LONG)
        own = await engine.supervisor.__ray_call__.remote(lambda self: os.getpid())
        os.kill(own, signal.SIGKILL)
        with pytest.raises(EngineClosed, match="supervisor is gone"):
            await read(client, "a", lambda count: None)
        assert "supervisor is gone" in str(client.healthy())
        await client.close()

    scenario(work)
    engine.stop()
    wait_until_gone(pids.values())


def test_what_cannot_start_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="1024 ranks"):
        SupervisedEngine.start(replace(config_of(folder), tp=1024))
    broken = tiny.save_plain(tmp_path, "kimi")
    [weights] = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=weights.name):
        SupervisedEngine.start(config_of(broken))
    wait_until_gone()
