#!/usr/bin/env python3
"""What lies between a step and its reader: driver actor to a client of it, and on to one over HTTP.

    python jobs/bench_ingress.py --out benchmarks/results

A driver without a model steps at a fixed pace for so many streams at once and notes when it gave
each step away; the client notes when each step's chunk came. `stream_ms` is the way to an engine
client in the reader's own process (one Ray streaming generator, one message a step), `http_ms` the
way through Ray Serve and the endpoint to the bytes of a server-sent event, `added_ms` what lies
between their percentiles: what the ingress adds. `proxy` is Ray Serve's own proxy, `haproxy` what
RAY_SERVE_ENABLE_HA_PROXY=1 puts in its place, `direct` the endpoint's own port, and `bare`, the
floor, a uvicorn that writes as many events and does nothing else. All runs on one machine, the
reader too; --pin gives driver and reader one half of its cores, and all else the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kdray.arguments import HelpFormatter
from kdray.errors import KdrayError

Arrivals = dict[str, list[float]]
INGRESSES = ("bare", "direct", "proxy", "haproxy")
_BODY = {"prompt": "x", "stream": True, "temperature": 0.0, "ignore_eos": True}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.one is not None:
        for row in rows_of(arguments):
            print(json.dumps(row), flush=True)
        return 0
    from record import Record

    record = Record("ingress", vars(arguments) | {"out": None}, arguments.out)
    try:
        for ingress in arguments.ingresses:
            for row in rows_of_child(ingress, arguments):
                params = {"ingress": ingress, "streams": row.pop("streams")}
                record.add(params | {"step_ms": arguments.step_ms}, {}, row)
    except KdrayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    record.finish()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--ingresses", nargs="+", choices=INGRESSES, default=INGRESSES, help="what answers HTTP")
    add("--streams", type=int, nargs="+", default=[1, 8, 32], help="open at the same time")
    add("--step-ms", type=float, default=20.0, help="from one step to the next")
    add("--steps", type=int, default=200, help="of each stream")
    add("--pin", action="store_true", help="keep the load off the cores of what is measured")
    add("--port", type=int, default=8900, help="of the endpoint")
    add("--out", type=Path, help="folder of the results file (default: none is written)")
    add("--one", choices=INGRESSES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def rows_of_child(ingress: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """In a process and a Ray of its own: Ray Serve reads what it is once, from its environment."""
    command = [sys.executable, __file__, "--one", ingress, "--streams"]
    command += [*map(str, arguments.streams), "--step-ms", str(arguments.step_ms)]
    command += ["--steps", str(arguments.steps), "--port", str(arguments.port)]
    command += ["--pin"] if arguments.pin else []
    flag = "1" if ingress == "haproxy" else "0"
    # What a job submitted to a cluster has of that cluster in its environment stays behind.
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS" and "RAY_JOB_" not in k}
    env |= {"RAY_SERVE_ENABLE_HA_PROXY": flag, "RAY_SERVE_LOG_TO_STDERR": "0"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if child.returncode != 0:
        raise KdrayError(f"the run with {ingress} ended with status {child.returncode}")


def rows_of(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of streams, as metrics and `streams`."""
    from kdray.actors.cluster import connect

    load, served = halves(os.sched_getaffinity(0))
    if arguments.pin:
        pin(os.getpid(), served)  # what Ray starts from here on inherits it
    connect(min_cpus=4)  # first: Ray reads its environment when it is imported
    import ray
    from paced_driver import TOKENS_A_STEP, PacedDriver

    from kdray import demo
    from kdray.model.tokenizer import Tokenizer

    vocab_size = Tokenizer.from_folder(demo.target_path()).vocab_size
    remote: Any = ray.remote(PacedDriver)
    driver = remote.options(num_cpus=0).remote(arguments.step_ms / 1000, vocab_size)
    close = open_endpoint(arguments.one, driver, arguments.port)
    if arguments.pin:
        for pid in (os.getpid(), ray.get(driver.info.remote())["pid"]):
            pin(pid, load)
    try:
        for streams in arguments.streams:
            lateness = {}
            for name, read in (("stream", read_directly), ("http", read_http)):
                max_tokens = TOKENS_A_STEP * arguments.steps
                arrivals = asyncio.run(read(driver, arguments.port, streams, max_tokens))
                emissions = ray.get(driver.emissions.remote())
                lateness[name] = lateness_ms(arrivals, emissions, arguments.steps)
            yield figures(lateness["stream"], lateness["http"]) | {"streams": streams}
    finally:
        close()
        ray.shutdown()


def open_endpoint(ingress: str, driver: Any, port: int) -> Callable[[], None]:
    """Serves the driver at the port; returns what ends it."""
    if ingress == "bare":
        import ray
        from bare_endpoint import BareEndpoint

        remote: Any = ray.remote(BareEndpoint)
        endpoint = remote.options(num_cpus=0).remote(driver, port)
        ray.get(endpoint.start.remote())
        return functools.partial(ray.kill, endpoint)
    from kdray import demo
    from kdray.serve import deployment
    from kdray.serve.arguments import Hosting

    model = deployment.ServedModel(name="paced", tokenizer_folder=demo.target_path())
    hosting = Hosting(direct_port=port) if ingress == "direct" else None
    behind = port + 1 if ingress == "direct" else port
    deployment.start(driver, model, hosting, host="127.0.0.1", port=behind)
    return functools.partial(deployment.stop, leave_serve=True)


def halves(cores: set[int]) -> tuple[list[int], list[int]]:
    """Both are all of them where there is but one."""
    ordered = sorted(cores)
    middle = len(ordered) // 2
    return (ordered[:middle] or ordered), ordered[middle:]


def pin(pid: int, cores: Sequence[int]) -> None:
    """All threads that the process has now."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def figures(stream: Sequence[float], http: Sequence[float]) -> dict[str, Any]:
    from bench_service import percentile

    row: dict[str, Any] = {"chunks": len(http)}
    for percent in (50, 99):
        direct, over_http = percentile(stream, percent), percentile(http, percent)
        assert direct is not None and over_http is not None
        row[f"stream_ms_p{percent}"] = round(direct, 3)
        row[f"http_ms_p{percent}"] = round(over_http, 3)
        row[f"added_ms_p{percent}"] = round(over_http - direct, 3)
    return row


async def read_directly(driver: Any, port: int, streams: int, max_tokens: int) -> Arrivals:
    """Through an engine client in this process."""
    from kdray.core.request import SamplingParams
    from kdray.serve.client import DriverClient

    client = await DriverClient.connect(driver)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    async def read(request_id: str) -> list[float]:
        await client.submit(request_id, [1], sampling)
        return [time.perf_counter() async for _ in client.outputs(request_id)]

    names = [f"direct-{streams}-{n}" for n in range(streams)]
    arrived = await asyncio.gather(*map(read, names))
    await client.close()
    return dict(zip(names, arrived, strict=True))


async def read_http(driver: Any, port: int, streams: int, max_tokens: int) -> Arrivals:
    """Through the endpoint, with a connection a stream."""
    import aiohttp

    url, body = f"http://127.0.0.1:{port}/v1/completions", _BODY | {"max_tokens": max_tokens}

    async def read(session: aiohttp.ClientSession) -> tuple[str, list[float]]:
        name, arrived = "", []
        async with session.post(url, json=body, raise_for_status=True) as response:
            async for line in response.content:
                if b'"kdray"' not in line:  # every step's chunk has it, no other chunk
                    continue
                arrived.append(time.perf_counter())
                name = name or json.loads(line.removeprefix(b"data: "))["id"]
        return f"{name}-0", arrived

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return dict(await asyncio.gather(*(read(session) for _ in range(streams))))


def lateness_ms(arrivals: Arrivals, emissions: Arrivals, steps: int) -> list[float]:
    """Milliseconds from the step to the reader, of every step of every stream."""
    late = []
    for name, arrived in arrivals.items():
        emitted = emissions[name]
        if not len(arrived) == len(emitted) == steps:
            raise KdrayError(f"{name}: {len(arrived)} chunks for {len(emitted)} steps")
        late += [1000 * (there - here) for here, there in zip(emitted, arrived, strict=True)]
    return late


if __name__ == "__main__":
    sys.exit(main())
