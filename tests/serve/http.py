"""Calls of an ASGI application: in process, or over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://kdray") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def chat(app: FastAPI, **members: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}]} | members
    return call(app, "POST", "/v1/chat/completions", content=json.dumps(body))


def complete(app: FastAPI, **members: Any) -> httpx.Response:
    return call(app, "POST", "/v1/completions", content=json.dumps({"prompt": "hi"} | members))


def events(response: httpx.Response) -> list[Any]:
    """Server-sent events, decoded; the last one must be [DONE], which is left out."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    payloads = [block.removeprefix("data: ") for block in blocks]
    assert payloads.pop() == "[DONE]"
    return [json.loads(payload) for payload in payloads]


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The application on a free port of the loopback; yields its base address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)


_GIVEN: set[int] = set()


def free_port() -> int:
    """One that nobody gets who does not ask for it by its number; another one every time.

    A port that the system picks (bind to 0) it gives to the next who lets it pick, and Ray's
    processes do that before the one that is to have it listens.
    """
    picked_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = picked_from if picked_from > 12_000 else 30_000  # there the system may pick any port
    for port in random.SystemRandom().sample(range(last - 10_000, last), 500):
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port
    raise AssertionError("no port is free")


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
