#!/usr/bin/env python3
"""Random traffic through an engine: for minutes, or against plain decoding request by request.

    python jobs/soak.py --minutes 20 --device cpu
    python jobs/soak.py --compare 1000 --device cuda --dtype float32

Requests of all kinds arrive and leave at random. In a soak one fixed request is repeated all the
while and must give the same tokens every time; pages are audited at every step. A comparison runs
the same traffic through the engine as configured, step by step from the host, and plainly, and
shows by how much the two tokens differed wherever two ways parted; where that is above what a near
tie may be, why (causes.py). Requests that leave get as far as their steps went, and are compared as
far as both ways go. Exits 1 where anything is wrong, or a parting has no cause in rounding, or at
any parting with --batch-invariant.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from causes import Cause, Causes
from judge import Judge
from record import Record
from traffic import Reply, Visit, demo_prompts, draw_visits, run_visits

from kdray.arguments import add_engine_arguments, engine_config
from kdray.config import EngineConfig
from kdray.core.request import Request, SamplingParams
from kdray.engine import Engine, build_engine, make_request, resolve
from kdray.errors import ConfigError, KdrayError

JUDGED = 100  # visits whose replies tell how far a dtype's rounding moves logits
PROBE = SamplingParams(max_tokens=64, temperature=0.8, seed=1234)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=None, help="of random traffic around a fixed probe")
    add("--compare", type=int, default=None, metavar="REQUESTS", help="with plain decoding")
    add("--seed", type=int, default=1, help="of the traffic")
    parser.add_argument("--ahead", action="store_true", help="device rounds on a CPU too")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    add_engine_arguments(parser)
    arguments = parser.parse_args(argv)
    if (arguments.minutes is None) == (arguments.compare is None):
        parser.error("give --minutes for a soak, or --compare for a number of requests")
    config = engine_config(arguments)
    # Engines follow one another here, and passes of the model alone lie beside them.
    config = replace(config, kv_memory_bytes=config.kv_memory_bytes or 1 << 30)
    torch.set_num_threads(config.threads or 1)
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.minutes is not None:
        record = Record("soak", vars(arguments) | {"out": None}, arguments.out)
        good = soak(config, arguments, record)
    else:
        dtype = str(resolve(config).dtype).removeprefix("torch.")
        kind = f"invariant-{dtype}" if config.batch_invariant else dtype
        record = Record(f"lossless-{kind}", vars(arguments) | {"out": None}, arguments.out)
        good = compare(config, arguments, record)
    record.finish()
    return 0 if good else 1


def engine_of(config: EngineConfig, arguments: argparse.Namespace) -> Engine:
    return build_engine(config, resolve(config), runs_ahead=True if arguments.ahead else None)


def soak(config: EngineConfig, arguments: argparse.Namespace, record: Record) -> bool:
    engine = engine_of(config, arguments)
    driver, facts = engine.driver, engine.facts
    prompts = demo_prompts(facts)
    visits = draw_visits(prompts, seed=arguments.seed)
    probes: list[Request] = []
    wrong = steps = visitors = 0
    leaving: dict[int, list[str]] = {}
    start = last = time.monotonic()
    deadline, next_arrival = start + 60 * arguments.minutes, 0
    running = True
    while running:
        steps += 1
        open_for_visitors = time.monotonic() < deadline
        waiting = driver.scheduler.num_waiting
        while open_for_visitors and steps >= next_arrival and waiting < config.max_requests:
            visit = next(visits)
            request = make_request(f"v{visitors}", visit.prompt, visit.sampling, facts)
            driver.submit(request)
            visitors += 1
            waiting += 1
            next_arrival = steps + visit.pause
            if visit.patience is not None:
                leaving.setdefault(steps + visit.patience, []).append(request.request_id)
        if open_for_visitors and (not probes or probes[-1].finish_reason is not None):
            wrong += len(probes) > 1 and probes[-1].tokens != probes[0].tokens
            probes = [*probes[:1], make_request(f"p{steps}", prompts[0], PROBE, facts)]
            driver.submit(probes[-1])
        running = driver.step() is not None or time.monotonic() < deadline
        for request_id in leaving.pop(steps, ()):
            driver.abort(request_id)
        if steps % 64 == 0:
            driver.scheduler.pages.check()
        if time.monotonic() - last > 30:
            last = time.monotonic()
            print(f"{last - start:.0f} s: {steps} steps, {visitors} visitors, {wrong} wrong probes",
                  file=sys.stderr, flush=True)  # fmt: skip
    wrong += probes[-1].tokens != probes[0].tokens
    driver.scheduler.pages.check()
    leaked = driver.scheduler.pages.num_used
    seconds = time.monotonic() - start
    record.add(
        {"mode": config.mode, "budget": config.budget, "device": facts.device.type},
        {},
        {
            "minutes": seconds / 60,
            "steps": float(steps),
            "requests": float(visitors),
            "tokens": float(driver.counters.generated_tokens),
            "preemptions": float(driver.scheduler.num_preemptions),
            "wrong_probes": float(wrong),
            "leaked_pages": float(leaked),
        },
    )
    return wrong == 0 and leaked == 0


def compare(config: EngineConfig, arguments: argparse.Namespace, record: Record) -> bool:
    prompts = demo_prompts(resolve(config))
    visits = list(islice(draw_visits(prompts, seed=arguments.seed), arguments.compare))
    first = "graphs" if resolve(config).device.type == "cuda" else "ahead"
    if first == "ahead" and not arguments.ahead:
        raise ConfigError("on a CPU there are no graphs: give --ahead to compare device rounds")
    ways = {
        first: config,
        "host": replace(config, graphs=False),
        "plain": replace(config, mode="plain", graphs=False),
    }
    replies: dict[str, list[Reply]] = {}
    for name, way in ways.items():
        engine = build_engine(
            way, resolve(way), runs_ahead=True if name == first and arguments.ahead else None
        )
        replies[name] = run_visits(engine.driver, engine.facts, visits)
        print(f"{name}: {sum(len(r.token_ids) for r in replies[name])} tokens", file=sys.stderr)
        engine.driver.close()
    judge = Judge(config)
    causes = Causes.of_config(config, judge.near_tie)
    texts = [
        (visit, reply.token_ids)
        for visit, reply in zip(visits[:JUDGED], replies["plain"], strict=False)
    ]
    moved = judge.movement(texts)
    good = True
    for one, other in ((first, "host"), (first, "plain"), ("host", "plain")):
        partings = [
            Parting(n, *judged(visit, a, b, judge, causes))
            for n, (visit, a, b) in enumerate(
                zip(visits, replies[one], replies[other], strict=True)
            )
            if parted(visit, a, b)
        ]
        ways_of = {"one": one, "other": other, "dtype": str(judge.dtype).removeprefix("torch.")}
        record.add(
            ways_of,
            {},
            {
                "requests": float(len(visits)),
                "left": float(sum(visit.patience is not None for visit in visits)),
                **summary(partings, judge.near_tie),
                "rounding_moves_median": float(np.median(moved)),
                "rounding_moves_p99": float(np.quantile(moved, 0.99)),
                "rounding_moves_most": float(moved.max()),
            },
        )
        add_causes(record, ways_of, partings, judge.near_tie)
        good &= not (config.batch_invariant and partings)
        good &= all(parting.verdict(judge.near_tie) != "unexplained" for parting in partings)
    return good


class Parting(NamedTuple):
    """margin is inf, and there is no cause, where a reply ended early; near ties need none."""

    visit: int
    margin: float
    cause: Cause | None

    def verdict(self, near_tie: float) -> str:
        if self.margin <= near_tie:
            return "near tie"
        return "unexplained" if self.cause is None else self.cause.verdict(near_tie)


def judged(
    visit: Visit, a: Reply, b: Reply, judge: Judge, causes: Causes
) -> tuple[float, Cause | None]:
    margin = judge.margin(visit, a.token_ids, b.token_ids)
    if margin <= judge.near_tie:
        return margin, None
    return margin, causes.of(visit, a.token_ids, b.token_ids)


def summary(partings: Sequence[Parting], near_tie: float) -> dict[str, float]:
    verdicts = [parting.verdict(near_tie) for parting in partings]
    unexplained = [
        parting.margin
        for parting, verdict in zip(partings, verdicts, strict=True)
        if verdict == "unexplained"
    ]
    return {
        "differing": float(len(partings)),
        "greatest_margin": max((parting.margin for parting in partings), default=0.0),
        "near_tie": near_tie,
        "near_ties": float(verdicts.count("near tie")),
        "by_experts": float(verdicts.count("experts")),
        "by_rounding": float(verdicts.count("rounding")),
        "unexplained": float(len(unexplained)),
        "greatest_unexplained": max(unexplained, default=0.0),
    }


def add_causes(
    record: Record, ways: dict[str, str], partings: Sequence[Parting], near_tie: float
) -> None:
    """A row a parting above the bound, and the near ties' margins in a line."""
    for parting in partings:
        verdict = parting.verdict(near_tie)
        if verdict != "near tie":
            params = {**ways, "visit": parting.visit, "verdict": verdict}
            figures = parting.cause.figures() if parting.cause else {"margin": parting.margin}
            record.add(params, {}, figures)
    if near := sorted(p.margin for p in partings if p.margin <= near_tie):
        print(f"margins of near ties: {', '.join(f'{m:.3g}' for m in near)}", file=sys.stderr)


def parted(visit: Visit, a: Reply, b: Reply) -> bool:
    """Whether two replies differ; of a visit that left, as far as both go."""
    if visit.patience is None:
        return a != b
    shared = min(len(a.token_ids), len(b.token_ids))
    return a.token_ids[:shared] != b.token_ids[:shared]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KdrayError as error:
        sys.exit(str(error))
