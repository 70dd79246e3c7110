"""A port of the endpoint's own: the same application, with no proxy of Ray Serve's in between.

Ray Serve's proxy is one Python process through which every event of every stream passes as a
message of Ray's; `jobs/bench_ingress.py` measures what that costs. Ray Serve still places,
watches and replaces the endpoint, and its own port stays open beside this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from kdray.errors import ConfigError

BIND_S = 20.0  # an endpoint that this one replaces may hold the port until its process is gone


class DirectDoor:
    """Opened once, in the endpoint's process and event loop; closed before its engine is.

    port      of the host's; one endpoint can have it
    drain_s   how long open requests may run on when it is closed
    """

    def __init__(self, port: int, drain_s: float) -> None:
        self._port = port
        self._drain_s = drain_s
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self, app: ASGIApp, host: str) -> None:
        """Returns once it listens. Raises ConfigError where the port stays taken."""
        listening = await _bound(host, self._port)
        config = uvicorn.Config(
            app,
            lifespan="off",  # the application's life is the deployment's business
            log_level="warning",  # and a line a request its own
            access_log=False,
            server_header=False,
            # What is not over a second before Ray Serve's own deadline is cut off in order.
            timeout_graceful_shutdown=max(1, math.floor(self._drain_s) - 1),
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        """Take nothing new, and let what is open end."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are Ray's in this process


async def _bound(host: str, port: int) -> socket.socket:
    until = time.monotonic() + BIND_S
    while True:
        try:
            return _listening(host, port)
        except (OSError, OverflowError) as error:
            if isinstance(error, OverflowError) or time.monotonic() > until:
                raise ConfigError(
                    f"direct_port: cannot listen on {host}:{port} ({error}): stop what uses it, "
                    "or choose another"
                ) from None
        await asyncio.sleep(0.2)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
