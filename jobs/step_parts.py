"""The rows of bench_step, part by part: what each runs, and the metrics it leaves."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import step_predict
import torch
from record import Record
from step_floor import Ceilings, Rows, Work, draft_sums, draft_work, floor_ms, step_work
from step_predict import MeasuredRound, predictions
from step_rank import Rank
from step_rounds import (
    ROOM,
    RoundCase,
    RoundTimes,
    draft_ms,
    engine_round,
    engine_size,
    round_times,
)
from step_rows import StepCase, cases, fits, refuse_broken, seen_of, step_of
from step_time import as_metrics, distinct_experts, profiled, replayed, spans_ms, time_by_op
from step_travel import Mutable, local_step, travel

from kdray.core.acceptance import AcceptanceProfile
from kdray.model.mla import EXPAND_FROM_ROWS

PARTS = ("engine", "round", "draft", "step", "ops", "predict")  # in turn: the few first
MOST_REPEATS_MS = 600.0  # of a row's timed runs

Params = dict[str, str | int | float]


@dataclass(eq=False)
class Bench:
    """What the rows share. record is None on ranks that follow."""

    arguments: argparse.Namespace
    rank: Rank
    ceilings: Ceilings
    record: Record | None
    start: float  # of the job, by time.perf_counter
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

    def is_late(self) -> bool:
        """Whether no row is to be begun; all ranks the same, by rank 0's clock."""
        late = time.perf_counter() - self.start > self.arguments.seconds
        if self.arguments.ranks == 1:
            return late
        told = torch.tensor([float(late)], device=self.rank.device)
        return bool(self.rank.collectives.broadcast(told).item())

    def repeats(self, ms: float) -> int:
        """So many timed runs; all ranks the same."""
        most = self.arguments.replays
        return most if self.arguments.ranks > 1 else max(3, min(most, int(MOST_REPEATS_MS / ms)))


def run_parts(bench: Bench) -> None:
    """Every part's rows in turn, as far as the time goes."""
    arguments, rank = bench.arguments, bench.rank
    rows: list[tuple[str, Callable[[], None]]] = []
    if "engine" in arguments.parts and arguments.ranks == 1:
        rows.append((f"engine {arguments.round}", partial(engine_row, bench)))
    if {"round", "predict"} & set(arguments.parts):
        rows += [(f"round {case}", partial(round_row, bench, case)) for case in rounds_of(bench)]
    if "draft" in arguments.parts:
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
        if bench.is_late():
            bench.failures.append(name)
            if bench.record is not None:
                print(f"FAILED  {name}: not begun, --seconds {arguments.seconds:g} are over")
            continue
        bench.attempt(name, row)


def step_row(bench: Bench, case: StepCase) -> None:
    rank, cache = bench.rank, bench.rank.verifier.cache
    began = time.perf_counter()
    call = step_of(rank, case)
    with rank.ops.watch() as chosen:
        refuse_broken(seen_of(rank, case, call)())
    refuse_broken(call())
    distinct = distinct_experts(chosen)
    run = replayed(call, rank.device) if case.way == "tree" else call
    seconds = time.perf_counter() - began
    [first] = spans_ms(run, rank.device, 1)
    samples = {"ms": spans_ms(run, rank.device, bench.repeats(first))}
    rows = Rows(
        tokens=case.tokens,
        requests=case.requests,
        cached=case.context,
        drawn=case.tokens if case.way == "tree" else 1,
        distinct=sum(distinct),
        expanded=case.way == "prompt" and case.tokens >= EXPAND_FROM_ROWS,
    )
    works = step_work(rank.model, cache, rows)
    floor = floor_ms(works, bench.ceilings)
    extra: dict[str, float | None] = {
        "floor_ms": floor,
        "fraction": floor / statistics.median(samples["ms"]),
        "distinct_experts": sum(distinct) / max(1, len(distinct)),
        "prepare_s": seconds,
    }
    extra |= {f"{work.name}_floor_ms": work.ms(bench.ceilings) for work in works}
    if isinstance(rank.collectives, Mutable):
        samples["local_ms"], alone = local_step(rank.collectives, rank, case, len(samples["ms"]))
        extra |= travel(samples["ms"], samples["local_ms"]) | {"local_distinct_experts": alone}
    bench.add(params_of("step", case), samples, extra)


def ops_row(bench: Bench, case: StepCase) -> None:
    """A step again, under the profiler: behind all that is timed, which it might slow down."""
    rank = bench.rank
    call = step_of(rank, case)
    call()
    run = replayed(call, rank.device) if case.way == "tree" else call
    run()
    by_op = time_by_op(profiled(run, together=bench.arguments.ranks > 1))
    bench.add(params_of("ops", case), {}, as_metrics(by_op))


def params_of(part: str, case: StepCase) -> Params:
    return {
        "part": part, "way": case.way, "tokens": case.tokens, "context": case.context,
        "requests": case.requests, "nodes": case.nodes,
    }  # fmt: skip


def draft_row(bench: Bench, streams: int, context: int) -> None:
    if bench.rank.drafter is None:
        return  # it is rank 0's
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
    if bench.arguments.ranks == 1:  # a prediction adds what collectives take by itself
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
    model = rank.facts.model
    row = model.hidden_size * step_predict.SUMMED_ITEM
    sums = [(1 + 2 * model.num_hidden_layers, tokens * row)]
    if case.mode != "plain":
        drafts = draft_work(rank, case.requests, case.context)
        sums += draft_sums(rank, case.requests, row)
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
        sums=sums,
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
        rates = (arguments.hit_rates, arguments.sibling_rates, arguments.off_path)
        acceptance = AcceptanceProfile.of(*rates, depth=bench.rank.depth)
        print(
            f"\nprediction: {step_predict.__doc__}\nhits, siblings, off_path: {rates}\n", flush=True
        )
        for measured in bench.rounds:
            params: Params = {
                "part": "prediction", "mode": measured.mode, "requests": measured.streams,
                "nodes": measured.nodes, "context": arguments.round_context,
            }  # fmt: skip
            bench.attempt(
                f"prediction {params}",
                partial(predict_row, bench, params, measured, acceptance),
            )
    print(f"\n{time.perf_counter() - bench.start:.0f} s in all", flush=True)
    for name in bench.failures:
        print(f"FAILED  {name}", flush=True)
    record.finish()


def predict_row(
    bench: Bench,
    params: Params,
    measured: MeasuredRound,
    acceptance: AcceptanceProfile,
) -> None:
    bench.add(params, {}, predictions(measured, acceptance, bench.ceilings))
