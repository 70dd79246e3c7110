#!/usr/bin/env python3
"""Bad requests by the thousand: no 5xx, errors in OpenAI's shape, and a server as well as before.

    python jobs/fuzz.py --requests 12000 --out benchmarks/results  # a server of its own, demo model
    python jobs/fuzz.py --url http://127.0.0.1:8000                # one that runs; it will be busy

Requests are drawn by hypothesis from the server's /openapi.json (fuzz_requests.py), the same ones
for the same --seed; about five in six are refused. Before and after, the server must answer /health
and give one greedy completion, the same both times; afterwards nothing may be left open, queued or
in the KV pages.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz_requests import FuzzRequest, requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from record import Record

BATCH = 250  # requests drawn by one run of hypothesis, and between two lines
TIMEOUT_S = 120.0
START_S = 180.0
MOST_SHOWN = 20
QUIET_S = 30.0
_ERROR = {"message", "type", "param", "code"}
_GAUGES = tuple(
    f"kdray_{name}"
    for name in ("requests_open", "requests_queued", "requests_running", "requests_waiting",
                 "pages_used", "restarts_total")
)  # fmt: skip
_REFUSED_BY_SERVE = (400, 404, 405)  # answered in front of the application, in another shape


@dataclass
class Findings:
    """What came back.

    routes     the paths there are, without parameters
    statuses   by method and route
    bad        what ought not to have come, each with its request
    """

    routes: list[str]

    statuses: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    bad: list[str] = field(default_factory=list)

    def total(self, low: int, high: int) -> float:
        """Answers with a status from low to below high."""
        counts = [count for route in self.statuses.values() for count in route.items()]
        return float(sum(count for status, count in counts if low <= status < high))


class Server:
    """One connection to a server, opened again where it was closed."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._place, timeout=TIMEOUT_S)

    def send(self, request: FuzzRequest) -> tuple[int, bytes]:
        """Status and body. OSError or HTTPException where it gives no answer, twice."""
        for last in (False, True):
            try:
                self._connection.request(
                    request.method, request.path, request.body, dict(request.headers)
                )
                response = self._connection.getresponse()
                return response.status, response.read()
            except (OSError, http.client.HTTPException):
                self._connection.close()
                if last:
                    raise
        raise AssertionError("either branch of the loop leaves it")

    def get(self, path: str) -> tuple[int, bytes]:
        return self.send(FuzzRequest("GET", path, b""))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    with serving(arguments.url) as url:
        server = Server(url)
        before = state_of(server)
        record = Record(
            "fuzz", {"requests": arguments.requests, "seed": arguments.seed}, arguments.out
        )
        findings = fuzz(server, arguments.requests, arguments.seed)
        after = settled(server)
    for route in sorted(findings.statuses):
        add_row(record, route, findings.statuses[route])
    wrong = [*findings.bad, *differences(before, after)]
    extra = {"requests": findings.total(0, 1000), "answered": findings.total(200, 300),
             "refused": findings.total(400, 500), "status_5xx": findings.total(500, 600),
             "bad": float(len(wrong))}  # fmt: skip
    record.add({"route": "all"}, {}, extra)
    for text in wrong[:MOST_SHOWN]:
        print(f"BAD {text}", file=sys.stderr)
    record.finish()
    return 1 if wrong else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a server that runs (default: one is started)")
    parser.add_argument("--requests", type=int, default=12_000, help="default: 12000")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--out", type=Path, help="where the results' file goes")
    return parser.parse_args(argv)


def fuzz(server: Server, count: int, first_seed: int) -> Findings:
    """So many requests, in batches of seeds of their own."""
    openapi = json.loads(server.get("/openapi.json")[1])
    findings = Findings([path.partition("/{")[0] for path in openapi["paths"]])
    strategy = requests(openapi)
    done, started = 0, time.monotonic()
    for batch in range(first_seed, first_seed + -(-count // BATCH)):
        size = min(BATCH, count - done)
        done += run_batch(server, strategy, batch, size, findings)
        print(
            f"{done} of {count} requests, {len(findings.bad)} bad, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    return findings


def run_batch(server: Server, strategy: Any, number: int, size: int, findings: Findings) -> int:
    sent = 0

    @seed(number)
    @settings(
        max_examples=size,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(request: FuzzRequest) -> None:
        nonlocal sent
        sent += 1
        judge(server, request, findings)

    one()
    return sent


def judge(server: Server, request: FuzzRequest, findings: Findings) -> None:
    route = f"{request.method} {route_of(request.path, findings.routes)}"
    try:
        status, body = server.send(request)
    except (OSError, http.client.HTTPException) as error:
        findings.bad.append(f"{error!r}: {request}")
        return
    findings.statuses[route][status] += 1
    problem = problem_of(status, body, is_head=request.method == "HEAD")
    if problem is not None:
        findings.bad.append(f"{problem}: {request} answered {body[:200]!r}")


def route_of(path: str, routes: Sequence[str]) -> str:
    """The longest route that a path begins with; "elsewhere" where there is none."""
    plain = path.partition("?")[0]
    found = [route for route in routes if plain == route or plain.startswith(f"{route}/")]
    return max(found, key=len, default="elsewhere")


def problem_of(status: int, body: bytes, *, is_head: bool) -> str | None:
    """None where an answer is as it should be."""
    if status >= 500:
        return f"status {status}"
    if status == 200 and b'"type":"server_error"' in body:
        return "a stream that ended with an error of the server's"
    if status < 400 or is_head:
        return None
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return None if status in _REFUSED_BY_SERVE and not body.startswith(b"{") else "no error"
    return (
        None if set(error) == {"message", "type", "param", "code"} else "an error of another shape"
    )


def state_of(server: Server) -> dict[str, Any]:
    """Health, a greedy completion, and what is open."""
    body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    status, answer = server.send(
        FuzzRequest("POST", "/v1/completions", json.dumps(body).encode(), headers)
    )
    gauges = {}
    for line in server.get("/metrics")[1].decode().splitlines():
        name, _, value = line.partition(" ")
        if name in _GAUGES:
            gauges[name] = float(value)
    text = json.loads(answer)["choices"][0]["text"] if status == 200 else answer.decode()
    return {"health": server.get("/health")[0], "status": status, "text": text} | gauges


def settled(server: Server) -> dict[str, Any]:
    """The state once what was given up on has been cleaned away."""
    deadline = time.monotonic() + QUIET_S
    while True:
        state = state_of(server)
        is_quiet = not state["kdray_requests_open"] and not state["kdray_pages_used"]
        if is_quiet or time.monotonic() > deadline:
            return state
        time.sleep(0.5)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{name} was {before.get(name)!r} before and is {value!r} after"
        for name, value in after.items()
        if before.get(name) != value
    ]


def add_row(record: Record, route: str, statuses: Counter[int]) -> None:
    counts = {f"status_{status}": float(count) for status, count in sorted(statuses.items())}
    record.add({"route": route}, {}, counts)


@contextlib.contextmanager
def serving(url: str | None) -> Iterator[str]:
    """The server at the URL, or one of the demo model for as long as this is entered."""
    if url is not None:
        yield url.rstrip("/")
        return
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = Path(__file__).with_name("serve.py")
    command = [sys.executable, str(job), "--device", "cpu", "--port", str(port), "--no-sample",
               "--max-model-len", "64", "--threads", "1"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ})
    try:
        wait_for(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=START_S)


def wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if Server(url).get("/health")[0] == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"no server within {START_S:g} s")


if __name__ == "__main__":
    sys.exit(main())
