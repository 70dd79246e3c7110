"""Faults of an engine on a GPU: a step that the device holds up, a gang killed and back."""

from __future__ import annotations

import asyncio
import math
import os
import queue
import signal
import time

import pytest
import torch

from kdray.config import EngineConfig, FaultPolicy
from kdray.core.request import SamplingParams
from kdray.driver.scheduler import RequestOutput
from kdray.driver.step_loop import StepLoop
from kdray.driver.watch import StepWatch
from kdray.engine import build_engine, make_request, resolve
from tests.harness import outputs_of, submit

pytestmark = pytest.mark.gpu

WAIT_S = 120.0
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PROMPT = list(range(100, 130))
POISON = 90
GANGS = [(1, 0), *([(2, 0), (2, 1)] if torch.cuda.device_count() > 1 else [])]


def test_a_device_that_does_not_get_on_is_seen_while_the_host_waits_for_it(
    device: torch.device,
) -> None:
    config = EngineConfig(device="cuda", max_requests=2, max_model_len=512)
    messages: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    watch = StepWatch(FaultPolicy(step_multiple=1.0, step_floor_s=1.0, start_steps=0))
    loop = StepLoop(lambda: build_engine(config, resolve(config)), messages.put, _nothing, watch)
    loop.start()
    engine = loop.ready.result(WAIT_S)
    loop.submit(make_request("a", PROMPT, LONG, resolve(config)))
    messages.get(timeout=WAIT_S)
    torch.cuda._sleep(10_000_000_000)  # several seconds in which nothing behind it begins
    while not (late := loop.pulse().is_late) and engine.driver.scheduler.num_running:
        time.sleep(0.05)
    assert late
    loop.close(WAIT_S)


def test_broken_logits_end_their_request_alone_in_captured_rounds(device: torch.device) -> None:
    config = EngineConfig(device="cuda", dtype="float32", max_requests=4, max_model_len=512)
    prompts, sampling = [PROMPT, [5, 6, 7]], SamplingParams(max_tokens=40, ignore_eos=True)

    def run(*, with_poison: bool) -> tuple[list[list[int]], list[str]]:
        engine = build_engine(config, resolve(config))
        requests = submit(engine, prompts, sampling)
        if with_poison:
            engine.driver.verifiers._verifier.model.embedding[POISON] = math.nan  # type: ignore[attr-defined]
            bad = make_request("bad", [7, POISON, 8], sampling, engine.facts)
            engine.driver.submit(bad)
        steps = [output for step in iter(engine.driver.step, None) for output in step]
        errors = [output.request_id for output in steps if output.finish_reason == "error"]
        return outputs_of(requests), errors

    expected, none = run(with_poison=False)
    assert none == [] and not any(POISON in text for text in expected)
    assert run(with_poison=True) == (expected, ["bad"])


@pytest.mark.parametrize("tp, rank", GANGS)
def test_a_killed_gang_gives_its_memory_back_and_goes_on(
    device: torch.device, tp: int, rank: int
) -> None:
    """Whichever rank is killed; rank 0 holds the driver."""
    import ray

    from kdray.actors.cluster import connect
    from kdray.actors.processes import gpu_memory_mib
    from kdray.actors.supervised import SupervisedEngine
    from kdray.serve.replay import ReplayingClient

    assert gpu_memory_mib(), "nvidia-smi says nothing: a gang's memory would not be waited for"
    connect(min_cpus=2 + tp, min_gpus=torch.cuda.device_count())
    config = EngineConfig(device="cuda", dtype="float32", tp=tp, max_requests=2, max_model_len=512)
    engine = SupervisedEngine.start(config)

    async def text(client: ReplayingClient, name: str, kills: dict[int, int]) -> list[int]:
        tokens: list[int] = []
        await client.submit(name, PROMPT, LONG)
        async for delta in client.outputs(name):
            tokens += delta.token_ids
            if len(tokens) > 50 and kills:
                os.kill(kills.pop(rank), signal.SIGKILL)
                kills.clear()
        return tokens

    async def both() -> None:
        client = await ReplayingClient.connect(engine.supervisor)
        undisturbed = await text(client, "a", {})
        pids = await engine.supervisor.pids.remote()
        assert await text(client, "b", pids) == undisturbed
        assert client.events.totals()["restarts_total"] == 1
        await client.close()

    try:
        asyncio.run(both())
    finally:
        engine.stop()
        ray.shutdown()


def _nothing() -> None:
    return None
