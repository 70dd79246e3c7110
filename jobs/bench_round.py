#!/usr/bin/env python3
"""Where a step's time goes, and what trees and chains gain: the whole round, in graphs and without.

    python jobs/bench_round.py --out benchmarks/results

models     demo: the embedded model and its drafter. random: shaped like Kimi K2.6, with random
           weights (jobs/random_model.py): its drafter is always wrong, so it shows what a step
           costs; tokens_per_s_at_demo_accept is its step rate times the accept length that the
           demo had in the same mode at the same batch
step_ms    wall clock a step, everybody decoding
tokens_per_s, accept_length   of the same steps
gpu_ms     the round alone, replayed without a host, so measured apart: idle = 1 - gpu_ms / step_ms
           scatters around 0 where the GPU never waits
host_ms    what the host does a step: schedule and launch
draft_ms .. commit_ms    the verbs, by events inside the graph
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import random_model
import torch
from gpu_timing import need_gpu
from record import Record
from traffic import demo_prompts

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.driver.ahead import AheadDecoder
from kdray.driver.device_round import DeviceRound
from kdray.driver.stages import VERBS
from kdray.engine import (
    SPARE_PAGES,
    Engine,
    EngineFacts,
    assemble,
    build_engine,
    make_request,
    resolve,
)
from kdray.kernels.ops import load_ops
from kdray.kernels.round_ops import load_round_ops
from kdray.model.drafter import DFlashDrafter
from kdray.model.target import TargetModel
from kdray.verifier.kv_cache import KVCache
from kdray.verifier.local_group import LocalGroup
from kdray.verifier.verifier import Verifier

WARM_STEPS = 4
CHAINS, TREES = (1, 3, 7), (3, 7, 16, 31)
WAYS = (("plain", 0), *(("chain", n) for n in CHAINS), *(("tree", n) for n in TREES))
WAYS_FROM_HOST = (("plain", 0), ("tree", 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one row runs."""

    model: str
    mode: str
    budget: int
    batch: int
    graphs: bool


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", choices=["demo", "random"], default=["demo", "random"]
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens, random model")
    parser.add_argument("--steps", type=int, default=40, help="timed steps, at most")
    parser.add_argument("--no-host", action="store_true", help="leave out rounds without graphs")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    need_gpu()
    record = Record("round", vars(arguments) | {"out": None}, arguments.out)
    accepted: dict[tuple[str, int, int], float] = {}
    for model in arguments.models:
        for batch in arguments.batches:
            for graphs in (True,) if arguments.no_host else (True, False):
                for mode, budget in WAYS if graphs else WAYS_FROM_HOST:
                    case = Case(model=model, mode=mode, budget=budget, batch=batch, graphs=graphs)
                    bench(case, arguments, record, accepted)
    record.finish()
    return 0


def bench(
    case: Case,
    arguments: argparse.Namespace,
    record: Record,
    accepted: dict[tuple[str, int, int], float],
) -> None:
    engine, prompts = engine_of(case, arguments.context)
    driver = engine.driver
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)
    for n in range(case.batch):
        prompt = prompts[n % len(prompts)]
        driver.submit(make_request(f"r{n}", prompt, sampling, engine.facts))
    while driver.scheduler.num_waiting:
        driver.step()
    for _ in range(WARM_STEPS):
        driver.step()
    torch.cuda.synchronize()
    before, seconds = replace(driver.counters), dict(driver.clock.seconds)
    lengths, drafted = sum_of(before.accept_lengths), before.accept_lengths.total()
    spans: list[float] = []
    while len(spans) < arguments.steps and driver.scheduler.num_running == case.batch:
        start = time.perf_counter()
        driver.step()
        spans.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    steps = len(spans)
    gained = driver.counters.generated_tokens - before.generated_tokens
    total = driver.counters.accept_lengths
    tries = total.total() - drafted
    accept = (sum_of(total) - lengths) / tries if tries else 1.0
    host = sum(driver.clock.seconds[s] - seconds[s] for s in ("schedule", "launch"))
    key = (case.mode, case.budget, case.batch)
    mean_ms = sum(spans) / steps
    metrics: dict[str, float | None] = {
        "tokens_per_s": 1e3 * gained / sum(spans),
        "accept_length": accept,
        "mean_step_ms": mean_ms,
        "host_ms": 1e3 * host / steps,
    }
    if case.model == "demo" and case.graphs:
        accepted[key] = accept
    elif case.model == "random" and key in accepted:
        metrics["tokens_per_s_at_demo_accept"] = 1e3 * case.batch * accepted[key] / mean_ms
    decoder = driver._decoder
    if decoder is not None:
        metrics |= inside(decoder, case, mean_ms)
    params = {
        "model": case.model,
        "mode": case.mode,
        "budget": case.budget,
        "batch": case.batch,
        "graphs": int(case.graphs),
    }
    record.add(params, {"step_ms": spans}, metrics)
    driver.close()


def inside(decoder: AheadDecoder, case: Case, step_ms: float) -> dict[str, float | None]:
    """The round of the last step replayed by itself, and again with events between its verbs."""
    chosen = decoder._rounds[decoder._buckets.choose(case.batch, decoder._buckets.num_nodes[-1])]
    gpu_ms = replayed_ms(chosen)
    marks = {verb: [external_event(), external_event()] for verb in VERBS}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        marks[name][0].record()
        yield
        marks[name][1].record()

    parts = replace(decoder._parts, stage=stage)
    marked = DeviceRound(parts, chosen.requests, chosen.num_nodes)
    marked.inputs.copy_(chosen.inputs)
    keep = [t.clone() for t in (parts.state._small, parts.state._wide)]
    marked.capture(None)
    samples: dict[str, list[float]] = {verb: [] for verb in VERBS}
    for _ in range(20):
        marked.run()
        torch.cuda.synchronize()
        for verb, (start, stop) in marks.items():
            samples[verb].append(start.elapsed_time(stop))
    parts.state._small.copy_(keep[0])
    verbs = {f"{verb}_ms": sorted(values)[len(values) // 2] for verb, values in samples.items()}
    return {"gpu_ms": gpu_ms, "idle": 1 - gpu_ms / step_ms, **verbs}


def replayed_ms(chosen: DeviceRound, replays: int = 20) -> float:
    chosen.run()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        chosen.run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / replays


def external_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, external=True)


def sum_of(lengths: dict[int, int]) -> int:
    return sum(length * count for length, count in lengths.items())


def engine_of(case: Case, context: int) -> tuple[Engine, list[list[int]]]:
    config = EngineConfig(
        device="cuda",
        mode=case.mode,  # type: ignore[arg-type]
        budget=case.budget,
        max_requests=case.batch,
        graphs=case.graphs,
        page_size=64 if case.model == "random" else 16,
        prefill_chunk=4096,
        kv_memory_bytes=32 << 30,
    )
    if case.model == "demo":
        facts = resolve(config)
        return build_engine(config, facts), demo_prompts(facts)
    return random_engine(config, context)


def random_engine(config: EngineConfig, context: int) -> tuple[Engine, list[list[int]]]:
    target_folder, drafter_folder = folders()
    config = replace(config, model=str(target_folder), drafter=str(drafter_folder))
    facts = resolve(config)
    ops, round_ops = load_ops(facts.device), load_round_ops(facts.device) if config.graphs else None
    model = target(facts)
    num_pages = facts.num_pages + SPARE_PAGES
    cache = KVCache(
        num_layers=model.num_layers, num_pages=num_pages, page_size=config.page_size,
        row=facts.kv_row, device=facts.device,
    )  # fmt: skip
    drafter = None
    if config.mode != "plain":
        drafter = DFlashDrafter.load(
            drafter_folder, model, ops=ops, page_size=config.page_size, num_pages=num_pages,
            candidates=config.candidates if config.mode == "tree" else 1, load_format="dummy",
        )  # fmt: skip
    verifier = Verifier(model, cache, ops, round_ops=round_ops)
    engine = assemble(config, facts, ops, drafter, LocalGroup(verifier), round_ops)
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 160000, (64, context), generator=generator).tolist()
    return engine, prompts


@cache
def folders() -> tuple[Path, Path]:
    home, target_folder, drafter_folder = random_model.temporary_folders()
    _homes.append(home)
    return target_folder, drafter_folder


_homes: list[object] = []  # temporary folders live as long as the job
_targets: dict[str, TargetModel] = {}


def target(facts: EngineFacts) -> TargetModel:
    """Drawn once; every case uses the same weights."""
    if "random" not in _targets:
        _targets["random"] = TargetModel.load(
            facts.target,
            ops=load_ops(facts.device),
            dtype=facts.dtype,
            device=facts.device,
            taps=random_model.DRAFTER["dflash_config"]["target_layer_ids"],
            load_format="dummy",
        )
    return _targets["random"]


if __name__ == "__main__":
    sys.exit(main())
