#!/usr/bin/env python3
"""Faults under load: every output must be what an undisturbed engine says.

    python jobs/chaos.py --out benchmarks/results
    python jobs/chaos.py --device cuda --dtype float32 --tp 2 --max-tokens 1500 --kill-every-s 30

The same requests run twice through an engine of several ranks and kdray's own endpoint, streamed:
once in peace, once while ranks are killed, stopped for ever, and rank 0 with the driver killed.
Faults are signals to processes that this job has started: the engine knows nothing of them, and
nothing of it could be told to do such a thing. Exits 1 where an output was lost, differs or ended
in an error, and where the run was too short for all faults.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from batch_lines import TEXT, Line
from record import Record
from traffic import Visit, demo_prompts, draw_visits

from kdray.actors.cluster import connect
from kdray.arguments import HelpFormatter, add_engine_arguments, engine_config
from kdray.config import EngineConfig, FaultPolicy
from kdray.core.request import SamplingParams
from kdray.engine import resolve
from kdray.errors import KdrayError
from kdray.model.tokenizer import Tokenizer

if TYPE_CHECKING:  # these import Ray, which reads its environment then: connect() sets that up
    from offline import Offline

    from kdray.actors.supervised import SupervisedEngine
    from kdray.serve.replay import ReplayingClient

STOPS = (".", " the", "\n\n")
# Sound steps take milliseconds to a second here; a hang lasts for ever. A window this short lets
# the engine be started again as often as it is broken.
POLICY = FaultPolicy(
    step_floor_s=8.0, start_steps=20, start_floor_s=15.0, pulse_timeout_s=8.0, window_s=1.0
)
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Reply:
    """What a request's reader got; tokens as far as they count."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    completion_tokens: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Fault:
    """What to do to which rank: SIGKILL ends it, SIGSTOP makes it hang."""

    kind: str
    rank: int

    @property
    def signal(self) -> signal.Signals:
        return signal.SIGSTOP if self.kind == "hang" else signal.SIGKILL


@dataclass(slots=True)
class Load:
    """The requests as they run; `shown` is when any reader last got text."""

    replies: dict[int, Reply] = field(default_factory=dict)
    shown: float = 0.0
    longest_silence_s: float = 0.0

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self.shown:
            self.longest_silence_s = max(self.longest_silence_s, now - self.shown)
        self.shown = now


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    wished = engine_config(arguments)
    if wished.tp < 2:
        raise KdrayError("faults of ranks need at least two: --tp 2")
    config = replace(wished, faults=POLICY)
    record = Record("chaos", vars(arguments) | {"out": None}, arguments.out)
    lines = list(islice(request_lines(config, arguments), arguments.requests))
    connect(min_cpus=config.tp + 1)
    good = asyncio.run(both(config, arguments, lines, record))
    record.finish()
    return 0 if good else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--requests", type=int, default=200, help="in all")
    add("--concurrency", type=int, default=16, help="open at the same time")
    add("--max-tokens", type=int, default=600, help="most tokens of a request")
    add("--kill-every-s", type=float, default=20.0, help="between two kills of a rank")
    add("--seed", type=int, default=7, help="of the requests")
    add("--out", type=Path, default=None, help="folder of the results file")
    add_engine_arguments(parser)
    parser.set_defaults(tp=2, device="cpu", threads=1)
    return parser.parse_args(argv)


def request_lines(config: EngineConfig, arguments: argparse.Namespace) -> Iterator[Line]:
    """Endless completions of the demo's prompts, drawn in all ways that clients draw."""
    facts = resolve(config)
    prompts = demo_prompts(facts)
    visits = draw_visits(prompts, seed=arguments.seed, most_tokens=arguments.max_tokens)
    for number, visit in enumerate(visits, start=1):
        stop = [STOPS[number // 8 % len(STOPS)]] if number % 8 == 0 else []
        body = body_of(visit, stop, facts.max_model_len)
        yield Line(number=number, source={}, path=TEXT, body=body)


def body_of(visit: Visit, stop: Sequence[str], longest: int) -> dict[str, Any]:
    sampling: SamplingParams = visit.sampling
    return {
        "prompt": list(visit.prompt),
        "max_tokens": min(sampling.max_tokens, longest - len(visit.prompt)),
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(token): value for token, value in sampling.logit_bias},
        "ignore_eos": True,
        "stop": list(stop),
    }


async def both(
    config: EngineConfig, arguments: argparse.Namespace, lines: list[Line], record: Record
) -> bool:
    from kdray.actors.supervised import SupervisedEngine

    engine = await asyncio.to_thread(SupervisedEngine.start, config)
    try:
        peaceful = await run(engine, lines, arguments, record, disturb=None)
        disturbed = await run(engine, lines, arguments, record, disturb=disturb)
    finally:
        await asyncio.to_thread(engine.stop)
    return judge(peaceful, disturbed, record)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: its replies by line, the faults that fell into it, the client's event counters."""

    replies: dict[int, Reply]
    faults: list[Fault]
    events: dict[str, int]


Disturb = Callable[
    ["SupervisedEngine", "ReplayingClient", Load, argparse.Namespace, Record, list[Fault]],
    Awaitable[None],
]


async def run(
    engine: SupervisedEngine,
    lines: Sequence[Line],
    arguments: argparse.Namespace,
    record: Record,
    disturb: Disturb | None,
) -> Outcome:
    """All lines, so many at a time, in order of arrival."""
    from offline import Offline

    from kdray.serve.replay import ReplayingClient

    client = await ReplayingClient.connect(engine.supervisor)
    tokenizer = Tokenizer.from_folder(engine.info["model_folder"])
    endpoint = Offline(client, tokenizer, "chaos")
    load, coming = Load(), iter(lines)
    faults: list[Fault] = []
    start = time.monotonic()
    troubling = (
        asyncio.create_task(disturb(engine, client, load, arguments, record, faults))
        if disturb
        else None
    )
    readers = (answer_all(endpoint, coming, load) for _ in range(arguments.concurrency))
    await asyncio.gather(*readers)
    seconds = time.monotonic() - start
    if troubling is not None:
        troubling.cancel()
        await asyncio.gather(troubling, return_exceptions=True)
    events = client.events.totals()
    await client.close()
    note(record, "chaos" if disturb else "peace", load, seconds, events)
    return Outcome(load.replies, faults, events)


async def answer_all(endpoint: Offline, coming: Iterator[Line], load: Load) -> None:
    for line in coming:
        answer = await endpoint.stream(line, load.show)
        choice = answer.body.get("choices", [{}])[0]
        used = (answer.body.get("usage") or {}).get("completion_tokens")
        load.replies[line.number] = Reply(
            text=answer.text,
            token_ids=tuple(answer.token_ids[:used]),
            finish_reason=choice.get("finish_reason"),
            completion_tokens=used,
            error=answer.error,
        )


def note(record: Record, name: str, load: Load, seconds: float, events: dict[str, int]) -> None:
    tokens = sum(reply.completion_tokens or 0 for reply in load.replies.values())
    record.add(
        {"run": name},
        {},
        {
            "seconds": seconds,
            "requests": float(len(load.replies)),
            "tokens": float(tokens),
            "tokens_per_s": tokens / seconds,
            "longest_silence_s": load.longest_silence_s,
            **{event.removesuffix("_total"): float(total) for event, total in events.items()},
        },
    )


def planned_faults() -> Iterator[Fault]:
    """Kills of rank 1, but the third of rank 0; a hang of each behind the first and the fourth."""
    for number in count():
        yield Fault("driver killed", 0) if number == 2 else Fault("rank killed", 1)
        if number in (0, 3):
            yield Fault("hang", 1 if number == 0 else 0)


async def disturb(
    engine: SupervisedEngine,
    client: ReplayingClient,
    load: Load,
    arguments: argparse.Namespace,
    record: Record,
    faults: list[Fault],
) -> None:
    """Kills at multiples of the period and hangs halfway between, each in a gang that is up; a time
    that passes while there is none is left out."""
    start, every_s = time.monotonic(), arguments.kill_every_s
    for fault in planned_faults():
        shift = every_s / 2 if fault.kind == "hang" else 0.0
        await asyncio.sleep(every_s - (time.monotonic() - start - shift) % every_s)
        restarts = client.events.totals()["restarts_total"]
        while not (pids := await engine.supervisor.pids.remote()):
            await asyncio.sleep(_POLL_S)
        struck = time.monotonic()
        os.kill(pids[fault.rank], fault.signal)
        faults.append(fault)
        while client.events.totals()["restarts_total"] == restarts:
            await asyncio.sleep(_POLL_S)
        up = time.monotonic()
        while load.shown < up:
            await asyncio.sleep(_POLL_S)
        record.add(
            {"fault": fault.kind, "rank": fault.rank},
            {},
            {
                "at_s": struck - start,
                "up_again_s": up - struck,
                "first_text_s": load.shown - struck,
                "done": float(len(load.replies)),
            },
        )


def judge(peaceful: Outcome, disturbed: Outcome, record: Record) -> bool:
    """Compares the two; the last row is the verdict."""
    lost = [n for n in peaceful.replies if n not in disturbed.replies]
    failed = [n for n, reply in disturbed.replies.items() if reply.error or reply.text == ""]
    differing = [n for n, reply in disturbed.replies.items() if reply != peaceful.replies[n]]
    kinds = [fault.kind for fault in disturbed.faults]
    counted = {kind: kinds.count(kind) for kind in ("rank killed", "driver killed", "hang")}
    record.add(
        {"run": "compared"},
        {},
        {
            "requests": float(len(peaceful.replies)),
            "lost": float(len(lost)),
            "errors": float(len(failed)),
            "differing": float(len(differing)),
            **{kind.replace(" ", "s_"): float(times) for kind, times in counted.items()},
        },
    )
    for n in differing:
        print(f"line {n}: {peaceful.replies[n]} became {disturbed.replies[n]}", file=sys.stderr)
    enough = counted["hang"] >= 2 and counted["driver killed"] >= 1
    if not enough:
        print("too short for all faults: more --requests or --max-tokens", file=sys.stderr)
    quiet = not any(reply.error for reply in peaceful.replies.values())
    return enough and quiet and not (lost or failed or differing)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        sys.exit(main())
    except KdrayError as error:
        sys.exit(str(error))
