#!/usr/bin/env python3
"""Load test of any endpoint that speaks OpenAI's wire format: kdray, SGLang, vLLM.

    python jobs/bench_service.py --url http://127.0.0.1:8000 --out benchmarks/results
    python jobs/bench_service.py --url http://HOST:8000 --rates 1 2 4 --requests 200
    python jobs/bench_service.py --url http://HOST:30000 --label sglang --synthetic 512:128

First its health and one answer; then a row for each concurrency (so many clients, each of which
asks again as soon as it has its answer) and for each rate (requests that come by themselves,
Poisson). Every row is printed and saved when it is done. TTFT counts from when a request was due,
so a client that falls behind does not hide it; TPOT is the time behind the first chunk over the
tokens behind it; tokens are the server's own count. $OPENAI_API_KEY is sent where it is set. Exit
status 1 where the service does not answer or every request of a row failed, 130 at a Ctrl-C, with
what was done.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kdray.arguments import HelpFormatter
from kdray.errors import KdrayError

if TYPE_CHECKING:
    from record import Record
    from service_client import Service, Timing
    from service_prompts import Ask, Prompts

CONCURRENCIES = [1, 2, 4, 8, 16, 32, 64, 128]
Load = Callable[["Service", "Sequence[Ask]"], Awaitable["list[Timing]"]]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        from record import Record

        name = f"service-{arguments.label}" if arguments.label else "service"
        prompts = None if arguments.prompts is None else str(arguments.prompts)
        config = vars(arguments) | {"out": None, "prompts": prompts}
        record = Record(name, config, arguments.out)
    except KeyboardInterrupt:
        return 130
    try:
        asyncio.run(bench(arguments, record))
    except KdrayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        record.finish()
        return 130
    record.finish()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    add("--model", help="the model id (default: the first that the server has)")
    add("--label", help="names the results file service-LABEL-HARDWARE.json (default: no label)")
    add("--concurrencies", type=int, nargs="*", default=CONCURRENCIES, help="closed loops")
    add("--rates", type=float, nargs="*", default=[], help="open loops, requests a second")
    add("--requests", type=int, default=64, help="of a row at least; two a client at least")
    add("--prompts", type=Path, metavar="FILE.jsonl", help="(default: the demo's held-out prompts)")
    add("--synthetic", metavar="IN:OUT", help="prompts and answers of so many tokens")
    add("--max-tokens", type=int, default=128, help="of an answer")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--ignore-eos", action="store_true", help="answers run on to max-tokens")
    add("--seed", type=int, default=1, help="of prompts and arrivals")
    add("--timeout-s", type=float, default=600.0, help="of one request")
    add("--out", type=Path, help="folder of the results file (default: none is written)")
    arguments = parser.parse_args(argv)
    if min([arguments.requests, *arguments.concurrencies, *arguments.rates], default=1) <= 0:
        parser.error("--requests, --concurrencies and --rates want numbers above 0")
    return arguments


async def bench(arguments: argparse.Namespace, record: Record) -> None:
    from service_client import service

    prompts = prompts_of(arguments)
    key = os.environ.get("OPENAI_API_KEY")
    async with service(
        arguments.url, model=arguments.model, key=key, timeout_s=arguments.timeout_s
    ) as target:
        await target.check()
        print(f"{target.model} at {target.url} is well", flush=True)
        if target.says:
            record.know(server=target.says)
            print(f"  {target.says}", flush=True)
        for number in arguments.concurrencies:
            count = max(arguments.requests, 2 * number)
            params: dict[str, Any] = {"mode": "closed", "concurrency": number, "rate": 0.0}
            await row(target, prompts.take(count), closed(number), params, record)
        for rate in arguments.rates:
            dice = random.Random(arguments.seed)
            params = {"mode": "open", "concurrency": 0, "rate": rate}
            await row(target, prompts.take(arguments.requests), opened(rate, dice), params, record)


def prompts_of(arguments: argparse.Namespace) -> Prompts:
    from service_prompts import demo_prompts, file_prompts, synthetic_prompts

    options = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    if arguments.ignore_eos:
        options["ignore_eos"] = True
    most = max([arguments.requests, *(2 * n for n in arguments.concurrencies)])
    if arguments.prompts is not None:
        return file_prompts(arguments.prompts, options)
    if arguments.synthetic is not None:
        return synthetic_prompts(arguments.synthetic, most, arguments.seed, options)
    return demo_prompts(most, arguments.seed, options)


async def row(
    target: Service, asks: Sequence[Ask], load: Load, params: dict[str, Any], record: Record
) -> None:
    """One load, measured. KdrayError where nothing came back."""
    from service_client import accept_length

    before = await target.metrics()
    start = time.perf_counter()
    timings = await load(target, asks)
    seconds = time.perf_counter() - start
    accepted = accept_length(before, await target.metrics())
    errors = Counter(t.error for t in timings if t.error is not None)
    samples, extra = figures(timings, seconds)
    record.add(params, samples, extra | {"accept_length_mean": accepted})
    if errors:
        said = next((t.detail for t in timings if t.detail), "")
        print(f"  errors: {dict(errors)} {said}", flush=True)
    if errors.total() == len(timings):
        raise KdrayError(f"all {len(timings)} requests failed: {dict(errors)}")


def closed(clients: int) -> Load:
    """So many clients, each with one request open."""

    async def run(target: Service, asks: Sequence[Ask]) -> list[Timing]:
        waiting, timings = iter(asks), []

        async def client() -> None:
            for ask in waiting:
                timings.append(await target.ask(ask.path, ask.body, time.perf_counter()))

        await asyncio.gather(*(client() for _ in range(clients)))
        return timings

    return run


def opened(rate: float, dice: random.Random) -> Load:
    """Requests that come whatever became of those before, `rate` a second on average."""
    if not rate > 0:
        raise KdrayError(f"--rates wants numbers greater than 0, got {rate}")

    async def run(target: Service, asks: Sequence[Ask]) -> list[Timing]:
        due, tasks = time.perf_counter(), []
        for ask in asks:
            due += dice.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(target.ask(ask.path, ask.body, due)))
        return list(await asyncio.gather(*tasks))

    return run


def figures(
    timings: Sequence[Timing], seconds: float
) -> tuple[dict[str, list[float]], dict[str, float | None]]:
    """Samples by metric, whose medians are the p50s, and the other figures of a row."""
    good = [t for t in timings if t.error is None]
    raw = {
        "ttft_ms_p50": [t.ttft_ms for t in good],
        "tpot_ms_p50": [t.tpot_ms for t in good],
        "stream_tokens_per_s": [t.stream_tokens_per_s for t in good],
    }
    samples = {name: [round(v, 3) for v in values if v is not None] for name, values in raw.items()}
    samples = {name: values for name, values in samples.items() if values}
    tokens = sum(t.tokens for t in good)
    return samples, {
        "ttft_ms_p99": percentile(samples.get("ttft_ms_p50", ()), 99),
        "tpot_ms_p99": percentile(samples.get("tpot_ms_p50", ()), 99),
        "tokens_per_s": tokens / seconds,
        "requests_per_s": len(good) / seconds,
        "requests": len(timings),
        "tokens": tokens,
        "errors": len(timings) - len(good),
    }


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else None


if __name__ == "__main__":
    sys.exit(main())
