"""What jobs/profile.py does: an engine, some load, a profile, its files."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from profile_client import HttpEngine, LocalEngine, Profiled

from kdray.arguments import (
    HelpFormatter,
    add_engine_arguments,
    add_placement_arguments,
    engine_config,
    placement_of,
)
from kdray.core.profile import ACTIVITIES, DEFAULT_STEPS, ProfileOptions
from kdray.errors import KdrayError
from kdray.profiling.check import problems

_WARM_REQUESTS = 2
_CPUS = 2  # beside the ranks'


def main(description: str, argv: Sequence[str] | None = None) -> int:
    arguments = parse(description, argv)
    try:
        asyncio.run(run(arguments))
    except KdrayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--url", help="a server that runs; else an engine is started (the options below)")
    add("--steps", type=int, default=DEFAULT_STEPS, help="engine steps to record")
    add(
        "--activities",
        nargs="*",
        choices=ACTIVITIES,
        default=[],
        help="what is recorded (default: CPU, and GPU where there is one)",
    )
    add("--with-stack", action="store_true", help="Python stacks of every operation: large files")
    add("--record-shapes", action="store_true", help="shapes of every operation's inputs")
    add("--out", type=Path, default=Path("profiles"), help="where a folder of the files goes")
    add("--requests", type=int, default=8, help="sent as load; 0: the server's own load is enough")
    add("--prompt-tokens", type=int, default=32, help="of each of them")
    add("--max-tokens", type=int, default=128, help="of each of their outputs")
    add_engine_arguments(parser)
    add_placement_arguments(parser)
    return parser.parse_args(argv)


async def run(arguments: argparse.Namespace) -> None:
    options = ProfileOptions(
        num_steps=arguments.steps,
        activities=frozenset(arguments.activities),
        with_stack=arguments.with_stack,
        record_shapes=arguments.record_shapes,
    )
    async with engine(arguments) as profiled:
        await load(profiled, arguments, min(arguments.requests, _WARM_REQUESTS))
        started = await profiled.profiles.start(options)
        print(f"profile {started['id']}: recording {arguments.steps} steps", flush=True)
        await load(profiled, arguments, arguments.requests)
        if not arguments.requests:
            await recorded(profiled, started["id"])
        status = await profiled.profiles.stop()
        folder = await fetch(profiled, status, arguments.out)
    show(status, folder)


@contextlib.asynccontextmanager
async def engine(arguments: argparse.Namespace) -> AsyncIterator[Profiled]:
    """The server that runs, or an engine for as long as this is entered."""
    if arguments.url:
        key = os.environ.get("KDRAY_ADMIN_KEYS", "").replace(",", " ").split()
        yield HttpEngine(arguments.url, key[0] if key else None)
        return
    config = engine_config(arguments)
    from kdray.actors.cluster import connect

    connect(min_cpus=config.tp + _CPUS)
    import ray

    try:
        print(f"starting {config.model} on {config.tp} rank(s) ...", flush=True)
        async with LocalEngine.started(config, placement_of(arguments)) as local:
            yield local
    finally:
        ray.shutdown()


async def load(profiled: Profiled, arguments: argparse.Namespace, requests: int) -> None:
    """So many requests at once, of random tokens that a seed draws; returns when all have ended."""
    dice = random.Random(0)
    vocabulary = range(1, min(profiled.vocab_size, 200))  # below any special token
    prompts = [dice.choices(vocabulary, k=arguments.prompt_tokens) for _ in range(requests)]
    await asyncio.gather(*(profiled.generate(prompt, arguments.max_tokens) for prompt in prompts))


async def recorded(profiled: Profiled, name: str) -> None:
    """Until others' requests have made all the steps."""
    while (await profiled.profiles.status(name))["state"] == "recording":
        await asyncio.sleep(0.5)


async def fetch(profiled: Profiled, status: dict[str, Any], out: Path) -> Path:
    folder = out / status["id"]
    folder.mkdir(parents=True, exist_ok=True)
    for file in status["files"]:
        content = await profiled.profiles.read(status["id"], file)
        (folder / file).write_bytes(content)
    return folder


def show(status: dict[str, Any], folder: Path) -> None:
    """Every rank's table, what is amiss, and at the end one line of JSON."""
    summary, merged = folder / "summary.txt", folder / "merged.json.gz"
    if summary.exists():
        print(f"\n{summary.read_text()}")
    amiss: list[str] = []
    if merged.exists():
        with gzip.open(merged) as file:
            amiss = problems(json.load(file))
        print(f"{merged}: open it at ui.perfetto.dev")
    for problem in amiss:
        print(f"  but: {problem}")
    found = {name: status[name] for name in ("id", "state", "steps", "error")}
    print(json.dumps(found | {"folder": str(folder), "problems": len(amiss)}))
    if status["state"] != "done":
        raise KdrayError(f"the profile is {status['state']}: {status['error']}")
