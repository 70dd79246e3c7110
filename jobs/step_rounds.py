"""Drafting by itself, whole rounds with their verbs, and an engine that runs them.

A round is the product's DeviceRound: draft, build, verify, accept, commit, captured as one graph.
On the other ranks of several its counterpart runs, as often.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from bench_round import Case, external_event, inside
from step_rank import Rank, with_passes
from step_ranks import Loopback
from step_rows import pages_of, running_state
from step_time import distinct_experts, replayed, spans_ms

from kdray.core.buckets import Buckets
from kdray.core.plan import RoundOrder
from kdray.core.request import SamplingParams
from kdray.driver.device_round import DeviceRound, RoundParts
from kdray.driver.stages import VERBS
from kdray.engine import assemble, make_request
from kdray.engine_rounds import capture_passes
from kdray.kernels.graphs import shared_pool
from kdray.kernels.page_tables import PageTables
from kdray.verifier.follower import FollowerRounds
from kdray.verifier.local_group import LocalGroup
from kdray.verifier.rank_group import RankGroup

REPLAYS = 10
ROOM = 256  # positions that the replays of a round may gain
WARM_STEPS = 3
ENGINE_STEPS = 20


@dataclass(frozen=True, slots=True)
class RoundCase:
    """requests by nodes, roots counted; mode: plain (one node), chain (a candidate a depth) or
    tree."""

    mode: str
    requests: int
    nodes: int
    context: int


class NoSender:
    """Headers for ranks that run the same without being told."""

    def send(self, message: bytes) -> None:
        return None

    def close(self) -> None:
        return None


def draft_ms(rank: Rank, requests: int, context: int, repeats: int = REPLAYS) -> list[float]:
    """Milliseconds of drafting a block for every request."""
    drafter = rank.drafter
    assert drafter is not None, "rank 0 drafts"
    state = running_state(rank, requests, context, ROOM)
    rows = state.rows(torch.arange(requests, dtype=torch.int32, device=rank.device))

    def draft() -> object:
        return drafter.propose_on_device(rows.root, rows.root_position, rows.page_table)

    return spans_ms(replayed(draft, rank.device), rank.device, repeats)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """samples   `round_ms`, and a verb each `draft_ms`, ..   distinct   experts, over all layers"""

    samples: dict[str, list[float]]
    distinct: int


def round_times(rank: Rank, case: RoundCase, repeats: int = REPLAYS) -> RoundTimes | None:
    """The captured round and its verbs; None on ranks that follow."""
    if rank.shard.rank > 0:
        return _follow(rank, case, repeats)
    state = running_state(rank, case.requests, case.context, ROOM + case.nodes)
    marks = _Marks(rank.device)
    parts = RoundParts(
        drafter=None if case.mode == "plain" else rank.drafter,
        verifiers=_group(rank),
        ops=rank.round_ops,
        state=state,
        depth=rank.depth,
        stage=marks.stage,
    )
    chosen = DeviceRound(parts, case.requests, case.nodes)
    if rank.device.type == "cuda":
        gc.collect()  # as AheadDecoder does
        chosen.capture(None)
    chosen.inputs[0] = torch.arange(case.requests, dtype=torch.int32)
    chosen.inputs[1] = case.nodes - 1
    chosen.inputs[2] = 1 if case.mode == "chain" else rank.candidates
    samples: dict[str, list[float]] = {f"{name}_ms": [] for name in ("round", *VERBS)}
    with rank.ops.watch() as experts:
        chosen.round()
    for _ in range(repeats):  # one by one: the graph's events hold its last run
        samples["round_ms"] += spans_ms(chosen.run, rank.device, 1, warm=0)
        for verb, ms in marks.read().items():
            samples[f"{verb}_ms"].append(ms)
    return RoundTimes(samples, sum(distinct_experts(experts)))


def engine_size(text: str) -> tuple[int, int]:
    """Requests and draft nodes of "1x15"."""
    requests, _, drafts = text.partition("x")
    return int(requests), int(drafts)


def engine_round(
    rank: Rank, requests: int, budget: int, context: int
) -> tuple[list[float], dict[str, float | None]]:
    """Prompts read and decoded by a whole engine: milliseconds of its steps, and figures.

    Its acceptance means nothing (random weights agree on nothing); its steps are real ones.
    """
    config = replace(rank.config, max_requests=requests, budget=budget)
    start = time.perf_counter()
    verifier, pool = with_passes(rank, config), shared_pool(rank.device)
    capture_passes(verifier, rank.device, pool)
    group = LocalGroup(verifier)
    engine = assemble(config, rank.facts, rank.ops, rank.drafter, group, rank.round_ops, pool)  # type: ignore[arg-type]
    captured = time.perf_counter()
    driver = engine.driver
    sampling = SamplingParams(max_tokens=8 * (WARM_STEPS + ENGINE_STEPS), ignore_eos=True)
    generator = np.random.default_rng(1)
    for n in range(requests):
        prompt = generator.integers(0, rank.num_tokens, max(context, 1)).tolist()
        driver.submit(make_request(f"r{n}", prompt, sampling, engine.facts))
    while driver.scheduler.num_waiting or driver.counters.prompt_tokens < requests * context:
        if driver.step() is None:
            raise RuntimeError("the engine stopped before the prompts were read")
    read = time.perf_counter()
    for _ in range(WARM_STEPS):
        driver.step()
    spans = []
    gained, lengths = driver.counters.generated_tokens, driver.counters.accept_lengths.copy()
    while len(spans) < ENGINE_STEPS and driver.scheduler.num_running == requests:
        begin = time.perf_counter()
        driver.step()
        spans.append(1e3 * (time.perf_counter() - begin))
    gained = driver.counters.generated_tokens - gained
    tried = driver.counters.accept_lengths - lengths
    accepted = sum(length * count for length, count in tried.items())
    if not spans:
        raise RuntimeError(f"not all of {requests} requests run at once; give --kv-tokens more")
    step_ms = sum(spans) / len(spans)
    metrics: dict[str, float | None] = {
        "tokens_per_s": 1e3 * gained / sum(spans),
        "accept_length": accepted / tried.total() if tried else None,
        "capture_s": captured - start,
        "prompt_tokens_per_s": requests * context / (read - captured) if context else None,
    }
    decoder = driver._decoder
    if decoder is not None and rank.device.type == "cuda":
        case = Case(model="", mode="tree", budget=budget, batch=requests, graphs=True)
        metrics |= inside(decoder, case, step_ms)
    driver.close()
    return spans, metrics


class _Marks:
    """When each verb began and ended: events in the graph, or the clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events = (
            {verb: (external_event(), external_event()) for verb in VERBS} if self._on_gpu else {}
        )
        self._clock: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        if self._on_gpu:
            self._events[name][0].record()
        yield
        if self._on_gpu:
            self._events[name][1].record()
        self._clock[name] = 1e3 * (time.perf_counter() - start)

    def read(self) -> dict[str, float]:
        if not self._on_gpu:
            return dict(self._clock)
        torch.cuda.synchronize()
        return {verb: start.elapsed_time(stop) for verb, (start, stop) in self._events.items()}


def _group(rank: Rank) -> LocalGroup | RankGroup:
    if rank.shard.size == 1 or isinstance(rank.collectives, Loopback):
        return LocalGroup(rank.verifier)
    return RankGroup(rank.verifier, NoSender(), rank.collectives)


def _follow(rank: Rank, case: RoundCase, repeats: int) -> None:
    """Another rank's side of round_ms."""
    size = rank.config.page_size
    pages = -(-(case.context + ROOM + case.nodes) // size)
    tables = PageTables(
        slots=case.requests,
        pages=pages,
        page_size=size,
        spare_page=rank.facts.num_pages,
        device=rank.device,
    )
    buckets = Buckets(requests=(case.requests,), num_nodes=(case.nodes,))
    rounds = FollowerRounds(
        rank.verifier,
        rank.collectives,
        tables,
        rank.round_ops,
        buckets=buckets,
        depth=rank.depth,
        drafter=None if case.mode == "plain" else rank.drafter,
    )
    if rank.device.type == "cuda":
        rounds.capture(shared_pool(rank.device))
    order = RoundOrder(
        size=(case.requests, case.nodes),
        slot=np.arange(case.requests, dtype=np.int32),
        tables=tuple((slot, pages_of(slot, pages)) for slot in range(case.requests)),
    )
    for _ in range(1 + repeats):
        rounds.run(order)
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
