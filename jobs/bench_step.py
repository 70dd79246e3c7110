#!/usr/bin/env python3
"""A verify step of Kimi K2.6 at its full size, on one of eight ranks: what it takes, and why.

    python jobs/bench_step.py --out benchmarks/results
    python jobs/bench_step.py --parts step --tokens 1 8 --contexts 0
    python jobs/bench_step.py --tp 2 --ranks 2 --layers 12 --tokens 1 8 64
    python jobs/bench_step.py --device cpu --tiny --layers 2

Rank 0's real shard of TP-8 (61 layers, full widths) and the whole drafter, random weights made on
the GPU (step_weights.py), in the product's own classes. With --ranks 1, the default, the other
ranks are looked for in the rank itself: all but the collectives is timed. --ranks N, equal to --tp,
runs N processes over N GPUs.

step     verify of trees in a CUDA graph, of prompts as the host runs them (step_rows.py says which
         rows are whose). ms, the floor (step_floor.py), fraction = floor / ms, distinct experts a
         layer
ops      the same steps once more, profiled: milliseconds by op
draft    drafting alone, one block a request, where their contexts fit the KV pages
round    the captured round and its verbs: draft, build, verify, accept, commit
engine   a whole engine on this shard: prompts read, captured rounds run ahead of the host
predict  tokens a second of tree, chain and plain, here and on 8 RTX PRO 6000, from the rounds and
         an assumed acceptance (step_predict.py has the formula and its sources)

A row that fails is told, the others run; the job then ends with 1.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import step_predict
import torch
from record import Record
from step_floor import Ceilings, Rows, Work, draft_work, floor_ms, step_work
from step_predict import Acceptance, MeasuredRound, predictions
from step_rank import (
    Loopback,
    Rank,
    SetUp,
    build_rank,
    meet,
    ranks_beside,
    temporary_folders,
)
from step_rounds import ROOM, RoundCase, RoundTimes, draft_ms, engine_round, round_times
from step_rows import StepCase, cases, fits, prompt_step, tree_step
from step_time import (
    as_metrics,
    distinct_experts,
    profiled,
    replayed,
    spans_ms,
    time_by_op,
)

from kdray.arguments import HelpFormatter
from kdray.config import EngineConfig
from kdray.errors import KdrayError
from kdray.facts import resolve
from kdray.model.manifest import check_shard
from kdray.model.parallel import Collectives, Shard, SoloCollectives

START = time.perf_counter()
TOKENS = [1, 4, 8, 9, 16, 17, 32, 33, 64, 128, 512, 2048]
CONTEXTS = [0, 8192, 32768]
Params = dict[str, str | int | float]
PARTS = ("engine", "round", "draft", "step", "ops", "predict")  # in turn: the few first
MOST_REPEATS_MS = 600.0  # of a row's timed runs


@dataclass(eq=False)
class Bench:
    """What the rows share. record is None on ranks that follow."""

    arguments: argparse.Namespace
    rank: Rank
    ceilings: Ceilings
    record: Record | None
    failures: list[str] = field(default_factory=list)
    rounds: list[MeasuredRound] = field(default_factory=list)

    def attempt(self, name: str, row: Callable[[], None]) -> None:
        """A row; what goes wrong in it is told, and where a GPU is lost nothing else is tried."""
        try:
            row()
        except Exception as error:
            traceback.print_exc()
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
            self.failures.append(name)
            if self.arguments.ranks > 1:
                raise  # the others wait for this one
            if self.rank.device.type == "cuda":
                torch.cuda.synchronize()  # raises again where the device is lost
        gc.collect()  # graphs hold memory until they are collected
        if self.rank.device.type == "cuda":
            torch.cuda.empty_cache()

    def add(
        self,
        params: Params,
        samples: dict[str, list[float]],
        extra: dict[str, float | None],
    ) -> None:
        if self.record is not None:
            self.record.add(params | {"tp": self.arguments.tp}, samples, extra)

    def repeats(self, ms: float) -> int:
        """So many timed runs; all ranks the same."""
        most = self.arguments.replays
        return most if self.arguments.ranks > 1 else max(3, min(most, int(MOST_REPEATS_MS / ms)))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        with temporary_folders(layers=arguments.layers, tiny=arguments.tiny) as folders:
            config = config_of(arguments, *folders)
            if arguments.ranks == 1:
                return run(arguments, config, Shard(0, arguments.tp), None)
            with ranks_beside(arguments.ranks, be_rank, arguments, config) as met:
                return run(arguments, config, Shard(0, arguments.tp), met)
    except KdrayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--tokens", type=int, nargs="+", default=TOKENS, help="rows of a step")
    add("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens cached, a request")
    add("--ways", nargs="+", choices=["tree", "prompt"], default=["tree", "prompt"])
    add("--layers", type=int, help="of the target; all 61 if not given")
    add("--tiny", action="store_true", help="small widths, for machines without a GPU")
    add("--tp", type=int, default=8, help="ranks that the model is split over")
    add("--ranks", type=int, default=1, help="that run: 1 (the others looked for in it) or --tp")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--kv-dtype", choices=["auto", "bf16", "fp8"], default="auto", help="of the latent cache")
    add("--draft-weights", choices=["auto", "int4"], default="auto", help="of the drafter's MLPs")
    add("--kv-tokens", type=int, default=300_000, help="that the KV pages hold")
    add("--page-size", type=int, default=64)
    add("--replays", type=int, default=12, help="timed runs of a row, at most")
    add("--streams", type=int, nargs="+", default=[1, 128], help="requests of a round")
    add("--drafts", type=int, nargs="+", default=[3, 7, 15], help="draft nodes of a round's trees")
    add("--round-context", type=int, default=512, help="tokens cached in rounds, a request")
    add("--round", default="1x15", metavar="REQUESTSxDRAFTS", help="what the engine runs")
    add("--seconds", type=float, default=180, help="after which no row is begun")
    add("--hit-rates", type=float, nargs="+", default=list(step_predict.HITS), metavar="RATE",
        help="of the drafter's first token, depth by depth (step_predict.py)")  # fmt: skip
    add("--sibling-rates", type=float, nargs="*", default=list(step_predict.SIBLINGS),
        metavar="RATE", help="of its second, third, .. token where the first is wrong")  # fmt: skip
    add("--off-path", type=float, default=step_predict.OFF_PATH, help="of its first behind those")
    add("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    if arguments.ranks not in (1, arguments.tp):
        parser.error(f"--ranks must be 1 or --tp {arguments.tp}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --tiny runs the same on a CPU")
    return arguments


def config_of(arguments: argparse.Namespace, target: Path, drafter: Path) -> EngineConfig:
    requests, drafts = engine_size(arguments.round)
    return EngineConfig(
        model=str(target),
        drafter=str(drafter),
        tp=arguments.tp,
        device=arguments.device,
        kv_dtype=arguments.kv_dtype,
        draft_weights=arguments.draft_weights,
        mode="tree",
        budget=drafts,
        max_requests=requests,
        max_model_len=max([*arguments.contexts, arguments.round_context]) + 4096,
        prefill_chunk=max(512, *arguments.tokens),
        page_size=arguments.page_size,
        num_pages=-(-arguments.kv_tokens // arguments.page_size),
    )


def engine_size(text: str) -> tuple[int, int]:
    requests, _, drafts = text.partition("x")
    return int(requests), int(drafts)


def be_rank(rank: int, port: int, arguments: argparse.Namespace, config: EngineConfig) -> None:
    shard = Shard(rank, arguments.tp)
    run(arguments, config, shard, lambda device: meet(rank, shard.size, port, device))


def run(
    arguments: argparse.Namespace,
    config: EngineConfig,
    shard: Shard,
    met: Callable[[torch.device], Collectives] | None,
) -> int:
    """One rank's part. met: how the ranks meet; None: there is one."""
    if arguments.device == "cuda":
        torch.cuda.set_device(shard.rank)
    facts = resolve(config)
    check_shard(facts.model, shard)
    leads = shard.rank == 0
    set_up = SetUp(facts.device, speaks=leads)
    with set_up.part("the device's copy and matmul speed"):
        ceilings = Ceilings.measured(facts.device)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    set_up.say(
        f"copy {ceilings.bytes_per_us / 1e6:.3f} TB/s, "
        f"bf16 matmul {ceilings.flops_per_us / 1e6:.1f} TFLOP/s"
    )
    with set_up.part("collectives"):
        collectives = met(facts.device) if met else alone(shard.size)
    rank = build_rank(config, facts, shard, collectives, set_up)
    record = Record("step", options(arguments), arguments.out) if leads else None
    bench = Bench(arguments, rank, ceilings, record)
    run_parts(bench)
    if record is not None:
        finish(bench, record)
    close = getattr(collectives, "close", None)
    if close is not None:
        close()
    return 1 if bench.failures else 0


def alone(size: int) -> Collectives:
    return SoloCollectives() if size == 1 else Loopback(size)


def options(arguments: argparse.Namespace) -> dict[str, object]:
    return vars(arguments) | {"out": None}


def run_parts(bench: Bench) -> None:
    """Every part's rows in turn, as far as the time goes."""
    arguments, rank = bench.arguments, bench.rank
    rows: list[tuple[str, Callable[[], None]]] = []
    if "engine" in arguments.parts and arguments.ranks == 1:
        rows.append((f"engine {arguments.round}", partial(engine_row, bench)))
    if {"round", "predict"} & set(arguments.parts):
        rows += [(f"round {case}", partial(round_row, bench, case)) for case in rounds_of(bench)]
    if "draft" in arguments.parts and rank.shard.rank == 0:
        rows += [
            (f"draft {streams} at {context}", partial(draft_row, bench, streams, context))
            for context in arguments.contexts
            for streams in arguments.streams
            if fits(rank, streams, context + ROOM)
        ]
    steps = list(cases(arguments.tokens, arguments.contexts, arguments.ways, rank))
    if "step" in arguments.parts:
        rows += [(f"step {case}", partial(step_row, bench, case)) for case in steps]
    if "ops" in arguments.parts and rank.device.type == "cuda":
        rows += [(f"ops {case}", partial(ops_row, bench, case)) for case in steps]
    for name, row in rows:
        if arguments.ranks == 1 and time.perf_counter() - START > arguments.seconds:
            print(f"FAILED  {name}: not begun, --seconds {arguments.seconds:g} are over")
            bench.failures.append(name)
            continue
        bench.attempt(name, row)


def step_row(bench: Bench, case: StepCase) -> None:
    rank, cache = bench.rank, bench.rank.verifier.cache
    make = tree_step if case.way == "tree" else prompt_step
    began = time.perf_counter()
    call = make(rank, case)
    with rank.ops.watch() as chosen:
        call()
    distinct = distinct_experts(chosen)
    run = replayed(call, rank.device) if case.way == "tree" else call
    seconds = time.perf_counter() - began
    [first] = spans_ms(run, rank.device, 1)
    samples = spans_ms(run, rank.device, bench.repeats(first))
    rows = Rows(
        tokens=case.tokens,
        requests=case.requests,
        cached=case.context,
        drawn=1 if case.way == "prompt" else case.tokens,
        distinct=sum(distinct),
        expanded=case.way == "prompt",
    )
    works = step_work(rank.model, cache, rows)
    floor = floor_ms(works, bench.ceilings)
    extra: dict[str, float | None] = {
        "floor_ms": floor,
        "fraction": floor / statistics.median(samples),
        "distinct_experts": sum(distinct) / max(1, len(distinct)),
        "prepare_s": seconds,
    }
    extra |= {f"{work.name}_floor_ms": work.ms(bench.ceilings) for work in works}
    bench.add(params_of("step", case), {"ms": samples}, extra)


def ops_row(bench: Bench, case: StepCase) -> None:
    """A step again, under the profiler: behind all that is timed, which it might slow down."""
    rank = bench.rank
    make = tree_step if case.way == "tree" else prompt_step
    call = make(rank, case)
    call()
    run = replayed(call, rank.device) if case.way == "tree" else call
    run()
    by_op = time_by_op(profiled(run))
    bench.add(params_of("ops", case), {}, as_metrics(by_op))


def params_of(part: str, case: StepCase) -> Params:
    return {
        "part": part, "way": case.way, "tokens": case.tokens, "context": case.context,
        "requests": case.requests, "nodes": case.nodes,
    }  # fmt: skip


def draft_row(bench: Bench, streams: int, context: int) -> None:
    samples = draft_ms(bench.rank, streams, context)
    floor = floor_ms(draft_work(bench.rank, streams, context), bench.ceilings)
    params: Params = {
        "part": "draft", "requests": streams, "context": context,
    }  # fmt: skip
    extra = {"floor_ms": floor, "fraction": floor / statistics.median(samples)}
    bench.add(params, {"draft_ms": samples}, extra)


def rounds_of(bench: Bench) -> list[RoundCase]:
    arguments, depth = bench.arguments, bench.rank.depth
    found = []
    for streams in arguments.streams:
        case = partial(RoundCase, requests=streams, context=arguments.round_context)
        found.append(case(mode="plain", nodes=1))
        found += [case(mode="chain", nodes=1 + n) for n in arguments.drafts if n <= depth]
        found += [case(mode="tree", nodes=1 + n) for n in arguments.drafts]
    return found


def round_row(bench: Bench, case: RoundCase) -> None:
    times = round_times(bench.rank, case)
    if times is None:
        return
    params: Params = {
        "part": "round", "mode": case.mode, "requests": case.requests, "nodes": case.nodes,
        "context": case.context,
    }  # fmt: skip
    measured = measured_round(bench, case, times)
    verify = floor_ms(measured.verify, bench.ceilings)
    layers = max(1, moe_layers(bench.rank))
    extra: dict[str, float | None] = {
        "verify_floor_ms": verify,
        "verify_fraction": verify / measured.verify_ms,
        "distinct_experts": times.distinct / layers,
    }
    bench.add(params, times.samples, extra)
    bench.rounds.append(measured)


def measured_round(bench: Bench, case: RoundCase, times: RoundTimes) -> MeasuredRound:
    rank = bench.rank
    ms = {name: statistics.median(values) for name, values in times.samples.items()}
    tokens = case.requests * case.nodes
    rows = Rows(
        tokens=tokens,
        requests=case.requests,
        cached=case.context,
        drawn=tokens,
        distinct=times.distinct,
    )
    drafts: list[Work] = []
    if case.mode != "plain":
        drafts = draft_work(rank, case.requests, case.context)
    model = rank.facts.model
    return MeasuredRound(
        mode=case.mode,
        streams=case.requests,
        nodes=case.nodes,
        round_ms=ms["round_ms"],
        draft_ms=ms["draft_ms"],
        verify_ms=ms["verify_ms"],
        rest_ms=ms["build_ms"] + ms["accept_ms"] + ms["commit_ms"],
        verify=step_work(rank.model, rank.verifier.cache, rows),
        draft=drafts,
        sums=1 + 2 * model.num_hidden_layers,
        sum_bytes=tokens * model.hidden_size * step_predict.SUMMED_ITEM,
    )


def moe_layers(rank: Rank) -> int:
    model = rank.facts.model
    return sum(model.is_moe(layer) for layer in range(model.num_hidden_layers))


def engine_row(bench: Bench) -> None:
    arguments = bench.arguments
    requests, drafts = engine_size(arguments.round)
    spans, metrics = engine_round(bench.rank, requests, drafts, arguments.round_context)
    params: Params = {
        "part": "engine", "mode": "tree", "requests": requests, "nodes": 1 + drafts,
        "context": arguments.round_context,
    }  # fmt: skip
    bench.add(params, {"step_ms": spans}, metrics)


def finish(bench: Bench, record: Record) -> None:
    """The predictions, what failed, and the record."""
    arguments = bench.arguments
    if "predict" in arguments.parts and bench.rounds:
        acceptance = Acceptance(
            tuple(arguments.hit_rates[: bench.rank.depth]),
            tuple(arguments.sibling_rates),
            arguments.off_path,
        )
        print(f"\nprediction: {step_predict.__doc__}\n{acceptance}\n", flush=True)
        for measured in bench.rounds:
            params: Params = {
                "part": "prediction", "mode": measured.mode, "requests": measured.streams,
                "nodes": measured.nodes, "context": arguments.round_context,
            }  # fmt: skip
            bench.attempt(
                f"prediction {params}",
                partial(predict_row, bench, params, measured, acceptance),
            )
    print(f"\n{time.perf_counter() - START:.0f} s in all", flush=True)
    for name in bench.failures:
        print(f"FAILED  {name}", flush=True)
    record.finish()


def predict_row(
    bench: Bench,
    params: Params,
    measured: MeasuredRound,
    acceptance: Acceptance,
) -> None:
    bench.add(params, {}, predictions(measured, acceptance, bench.ceilings))


if __name__ == "__main__":
    sys.exit(main())
