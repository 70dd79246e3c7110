#!/usr/bin/env python3
"""How often prompts hold up those who decode: closed loops of clients straight at the driver.

    python jobs/bench_admission.py --device cpu
    python jobs/bench_admission.py --device cuda --out benchmarks/results

at_once    a free slot is filled at once, whatever that costs those who decode
gather     prompts of waiting requests share a step (kdray.driver.turns.PromptTurns): the engine's

Rows count steps; a device round is one that runs ahead of the host. On a GPU times are the wall
clock's, and the verbs' are of a step of prompts. On a CPU, where a step from the host costs no
more than a round, they are modelled: a round takes --round-ms and launching a step from the host
--host-step-ms, by default what the demo took on an H200, so a run gives the same figures
everywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_service import percentile
from closed_loop import Clock, Loop, ModelledClock, WallClock, run_loop
from record import Record
from traffic import demo_prompts

from kdray.arguments import HelpFormatter
from kdray.config import EngineConfig
from kdray.core.request import Request, SamplingParams
from kdray.driver.driver import Driver
from kdray.driver.stages import VERBS
from kdray.driver.stats import DriverStats, snapshot
from kdray.driver.turns import PromptTurns
from kdray.engine import Engine, build_engine, make_request, resolve


class AtOnce(PromptTurns):
    """Nobody waits who has a slot."""

    def is_due(self, *, waiting: int, decoding: int) -> bool:
        return True


WAYS = {"at_once": AtOnce, "gather": PromptTurns}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    record = Record("admission", vars(arguments) | {"out": None}, arguments.out)
    engine = engine_of(arguments)
    if arguments.device == "cuda":  # the first of a shape waits for memory and kernels
        run_loop(engine.driver, requests_of(engine, 64, arguments, "warm"), 32, 0.0, WallClock())
    for clients in arguments.clients:
        for way in arguments.ways:
            bench(engine, clients, way, arguments, record)
    engine.driver.close()
    record.finish()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--clients", type=int, nargs="+", default=[4, 16, 32])
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--requests", type=int, default=128, help="of a row")
    add("--max-requests", type=int, default=16, help="slots of the engine")
    add("--max-tokens", type=int, default=128, help="of an answer")
    add("--away-ms", type=float, default=3.0, help="between an answer and its client's next ask")
    add("--round-ms", type=float, default=1.0, help="modelled, of a device round")
    add("--host-step-ms", type=float, default=9.0, help="modelled, of a step from the host")
    add("--out", type=Path, help="folder of the results file (default: none is written)")
    return parser.parse_args(argv)


def engine_of(arguments: argparse.Namespace) -> Engine:
    config = EngineConfig(device=arguments.device, max_requests=arguments.max_requests)
    return build_engine(config, resolve(config), runs_ahead=True)


def requests_of(
    engine: Engine, count: int, arguments: argparse.Namespace, name: str
) -> list[Request]:
    prompts = demo_prompts(engine.facts, each=-(-count // 4))
    sampling = SamplingParams(max_tokens=arguments.max_tokens)
    mixed = [prompts[(n % 4) * (len(prompts) // 4) + n // 4] for n in range(count)]
    return [
        make_request(f"{name}-{n}", prompt, sampling, engine.facts)
        for n, prompt in enumerate(mixed)
    ]


def bench(
    engine: Engine, clients: int, way: str, arguments: argparse.Namespace, record: Record
) -> None:
    driver = engine.driver
    decoder, whole = driver._decoder, driver.round
    assert decoder is not None
    launch, collect = decoder.launch, decoder.collect
    clock = clock_of(driver, arguments)
    driver.prompt_turns = WAYS[way](clock.now)
    requests = requests_of(engine, arguments.requests, arguments, f"{way}-{clients}")
    before = snapshot(driver)
    loop = run_loop(driver, requests, clients, arguments.away_ms / 1e3, clock)
    decoder.launch, decoder.collect = launch, collect  # type: ignore[method-assign]
    driver.round = whole  # type: ignore[method-assign]
    after = snapshot(driver)
    samples = {
        "ttft_ms_p50": [round(1e3 * s, 3) for s in loop.ttft_s],
        "latency_ms_p50": [round(1e3 * s, 3) for s in loop.latency_s],
    }
    extra = figures(loop, before, after, len(requests), arguments.max_requests)
    if arguments.device == "cuda":
        extra |= stages(loop, before, after)
    extra["ttft_ms_p99"] = percentile(samples["ttft_ms_p50"], 99)
    record.add({"clients": clients, "way": way}, samples, extra)


def clock_of(driver: Driver, arguments: argparse.Namespace) -> Clock:
    if arguments.device == "cuda":
        return WallClock()
    return ModelledClock(
        driver,
        round_s=arguments.round_ms / 1e3,
        host_step_s=arguments.host_step_ms / 1e3,
        launch_s=1e-4,
    )


def figures(
    loop: Loop, before: DriverStats, after: DriverStats, requests: int, slots: int
) -> dict[str, float | None]:
    rounds = loop.running.total()
    prompt_steps = after.prompt_steps - before.prompt_steps
    tokens = after.generated_tokens - before.generated_tokens
    return {
        "prompt_steps": prompt_steps,
        "prompts_a_step": requests / prompt_steps,
        "rounds": rounds,
        "full_rounds": loop.running[slots],
        "requests_a_round": sum(r * n for r, n in loop.running.items()) / rounds,
        "rounds_a_prompt_step": rounds / prompt_steps,
        "tokens": tokens,
        "tokens_per_s": tokens / loop.seconds,
    }


def stages(loop: Loop, before: DriverStats, after: DriverStats) -> dict[str, float | None]:
    """Where the host's time goes: its verbs a step of prompts, the others a round."""
    spent = {
        stage: 1e3 * (seconds - before.stage_seconds[stage])
        for stage, seconds in after.stage_seconds.items()
    }
    prompt_steps, rounds = after.prompt_steps - before.prompt_steps, loop.running.total()
    verbs: dict[str, float | None] = {f"{v}_ms": spent[v] / prompt_steps for v in VERBS}
    others = {f"{s}_ms": spent[s] / rounds for s in ("schedule", "launch", "wait")}
    return verbs | others | {"prompt_step_ms": sum(spent[v] for v in VERBS) / prompt_steps}


if __name__ == "__main__":
    sys.exit(main())
