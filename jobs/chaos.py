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
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from batch_lines import Line
from chaos_faults import Fault, Trouble
from chaos_load import Load, Reply, answer_all, request_lines
from record import Record

from kdray.actors.cluster import connect
from kdray.arguments import HelpFormatter, add_engine_arguments, engine_config
from kdray.config import EngineConfig, FaultPolicy
from kdray.errors import KdrayError
from kdray.model.tokenizer import Tokenizer

if TYPE_CHECKING:  # it imports Ray, which reads its environment then: connect() sets that up
    from kdray.actors.supervised import SupervisedEngine

# Sound steps take milliseconds to a second here; a hang lasts for ever. A window this short lets
# the engine be started again as often as it is broken.
POLICY = FaultPolicy(
    step_floor_s=8.0, start_steps=20, start_floor_s=15.0, pulse_timeout_s=8.0, window_s=1.0
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    wished = engine_config(arguments)
    if wished.tp < 2:
        raise KdrayError("faults of ranks need at least two: --tp 2")
    config = wished if arguments.faults else replace(wished, faults=POLICY)
    record = Record("chaos", vars(arguments) | {"out": None}, arguments.out)
    coming = request_lines(config, seed=arguments.seed, most_tokens=arguments.max_tokens)
    lines = list(islice(coming, arguments.requests))
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


async def both(
    config: EngineConfig, arguments: argparse.Namespace, lines: list[Line], record: Record
) -> bool:
    from kdray.actors.supervised import SupervisedEngine

    engine = await asyncio.to_thread(SupervisedEngine.start, config)
    try:
        peaceful = await run(engine, lines, arguments, record, troubled=False)
        disturbed = await run(engine, lines, arguments, record, troubled=True)
    finally:
        await asyncio.to_thread(engine.stop)
    return judge(peaceful, disturbed, record)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: its replies by line, and the faults that fell into it."""

    replies: dict[int, Reply]
    faults: list[Fault]


async def run(
    engine: SupervisedEngine,
    lines: Sequence[Line],
    arguments: argparse.Namespace,
    record: Record,
    *,
    troubled: bool,
) -> Outcome:
    """All lines, so many at a time, in order of arrival."""
    from offline import Offline

    from kdray.serve.replay import ReplayingClient

    client = await ReplayingClient.connect(engine.supervisor)
    tokenizer = Tokenizer.from_folder(engine.info["model_folder"], engine.info["load_format"])
    endpoint = Offline(client, tokenizer, "chaos")
    load, coming = Load(), iter(lines)
    trouble = Trouble(engine.supervisor, client.events, load, record)
    start = time.monotonic()
    striking = asyncio.create_task(trouble.strike(arguments.kill_every_s)) if troubled else None
    readers = (answer_all(endpoint, coming, load) for _ in range(arguments.concurrency))
    await asyncio.gather(*readers)
    seconds = time.monotonic() - start
    if striking is not None and not striking.cancel():
        striking.result()  # it ends by itself only with an error
    events = client.events.totals()
    await client.close()
    note(record, "chaos" if troubled else "peace", load, seconds, events)
    return Outcome(load.replies, trouble.faults)


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


def judge(peaceful: Outcome, disturbed: Outcome, record: Record) -> bool:
    """Compares the two; the last row is the verdict."""
    lost = [n for n in peaceful.replies if n not in disturbed.replies]
    failed = [n for n, reply in disturbed.replies.items() if reply.error]
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
