#!/usr/bin/env python3
"""How often prompts hold up those who decode: closed loops of clients straight at the driver.

    python jobs/bench_admission.py --device cpu
    python jobs/bench_admission.py --device cuda --out benchmarks/results

gather     prompts of waiting requests share a step (kdray.driver.turns.PromptTurns)
at_once    a free slot is filled at once, whatever that costs those who decode

Rows count steps; a device round is one that runs ahead of the host. On a GPU times are the wall
clock's. On a CPU, where a round from the host costs no more than one ahead of it, they are
modelled: a round takes --round-ms and a step from the host --host-step-ms, by default what the
demo took on an H200, so the same run gives the same figures everywhere.
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
from kdray.driver.turns import PromptTurns
from kdray.engine import Engine, build_engine, make_request, resolve

WAYS = ("at_once", "gather")


class AtOnce(PromptTurns):
    """Nobody waits who has a slot."""

    def is_due(self, *, waiting: int, decoding: int) -> bool:
        return True


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    record = Record("admission", vars(arguments) | {"out": None}, arguments.out)
    engine = engine_of(arguments)
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
    launch, whole = driver._decoder.launch, driver.round  # type: ignore[union-attr]
    clock = clock_of(driver, arguments)
    driver.prompt_turns = (PromptTurns if way == "gather" else AtOnce)(clock.now)
    requests = requests_of(engine, arguments.requests, arguments, f"{way}-{clients}")
    counters = driver.counters
    before = counters.prompt_steps, counters.generated_tokens
    loop = run_loop(driver, requests, clients, arguments.away_ms / 1e3, clock)
    driver._decoder.launch, driver.round = launch, whole  # type: ignore[union-attr, method-assign]
    prompt_steps = counters.prompt_steps - before[0]
    tokens = counters.generated_tokens - before[1]
    samples = {
        "ttft_ms_p50": [round(1e3 * s, 3) for s in loop.ttft_s],
        "latency_ms_p50": [round(1e3 * s, 3) for s in loop.latency_s],
    }
    extra = figures(loop, len(requests), prompt_steps, tokens, arguments.max_requests)
    extra["ttft_ms_p99"] = percentile(samples["ttft_ms_p50"], 99)
    record.add({"clients": clients, "way": way}, samples, extra)


def clock_of(driver: Driver, arguments: argparse.Namespace) -> Clock:
    if arguments.device == "cuda":
        return WallClock()
    return ModelledClock(
        driver, round_s=arguments.round_ms / 1e3, host_step_s=arguments.host_step_ms / 1e3
    )


def figures(
    loop: Loop, requests: int, prompt_steps: int, tokens: int, slots: int
) -> dict[str, float | None]:
    rounds = loop.running.total()
    return {
        "prompt_steps": prompt_steps,
        "prompts_a_step": requests / prompt_steps,
        "rounds": rounds,
        "full_rounds": sum(n for running, n in loop.running.items() if running == slots),
        "requests_a_round": sum(r * n for r, n in loop.running.items()) / rounds,
        "rounds_a_prompt_step": rounds / prompt_steps,
        "tokens": tokens,
        "tokens_per_s": tokens / loop.seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
