"""The application as a Ray Serve deployment: each replica is the HTTP process of one engine."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
import time
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.actor import ActorHandle
from ray.serve import Application, Deployment

from kdray.actors.room import STRATEGY, with_device
from kdray.config import EngineConfig
from kdray.errors import ConfigError, EngineClosed
from kdray.logs import show_logs
from kdray.model.tokenizer import Tokenizer
from kdray.serve.app import build_app
from kdray.serve.arguments import Arguments, Hosting
from kdray.serve.backends import (
    Attached,
    Backend,
    Connect,
    Hosted,
    ServedModel,
    listening_host,
)
from kdray.serve.direct import DirectDoor
from kdray.serve.engine import EngineClient
from kdray.serve.progress import ProgressWatch
from kdray.serve.ray_metrics import mirror

__all__ = ["Endpoint", "ServedModel", "application", "hosting_application", "start", "stop"]

MAX_ONGOING_REQUESTS = 4096
_APPLICATION = "kdray"


class Endpoint:
    """Opens the engine and builds the application in the replica's process, in its own event loop.

    Ray Serve stops it by sending nothing new, waiting for what is open, and calling __del__.
    """

    def __init__(self, backend: Backend, stall_s: float, door: DirectDoor | None = None) -> None:
        # Copies: Serve pickles its own again, and what is open cannot be pickled.
        self._backend = copy.copy(backend)
        self._door = copy.copy(door)
        self._watch = ProgressWatch(stall_s)
        self._engine: EngineClient | None = None
        self._mirroring: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve once, behind the constructor."""
        show_logs()
        self._engine, model = await self._backend.open()
        tokenizer = Tokenizer.from_folder(model.tokenizer_folder, model.load_format)
        app = build_app(self._engine, tokenizer, model.name, model.limits, model.keys)
        if self._door is not None:
            await self._door.open(app, listening_host())
        self._mirroring = asyncio.create_task(mirror(app.state.surface.families))
        return app

    async def check_health(self) -> None:
        """Ray Serve replaces a replica that raises here."""
        if self._engine is None:
            raise EngineClosed("not connected yet")
        cause = await self._watch.cause(self._engine)
        if cause is not None:
            raise EngineClosed(cause)

    async def __del__(self) -> None:
        if self._door is not None:
            await self._door.close()
        if self._mirroring is not None:
            self._mirroring.cancel()
        await self._backend.close()


def application(
    engine: ActorHandle[Any] | Connect, model: ServedModel, hosting: Hosting | None = None
) -> Application:
    """One endpoint in front of a driver actor, or of what a factory connects to in the replica."""
    hosting = hosting or Hosting()
    deployed = _deployment(hosting, ray_actor_options={"num_cpus": 0})
    return deployed.bind(
        Attached(engine, model), hosting.patience_s(EngineConfig()), _door(hosting)
    )


def hosting_application(arguments: Arguments) -> Application:
    """Endpoints that start engines of their own, each in one placement group: a bundle of CPUs for
    the HTTP process, then one for each rank."""
    arguments = replace(arguments, config=with_device(arguments.config))
    config, hosting = arguments.config, arguments.hosting
    ingress = {"CPU": hosting.ingress_cpus}
    deployed = _deployment(
        hosting,
        ray_actor_options={"num_cpus": hosting.ingress_cpus},
        placement_group_bundles=[ingress] + [arguments.placement.bundle(config)] * config.tp,
        placement_group_strategy=STRATEGY,
    )
    return deployed.bind(Hosted(arguments), hosting.patience_s(config), _door(hosting))


def _door(hosting: Hosting) -> DirectDoor | None:
    port = hosting.direct_port
    return None if port is None else DirectDoor(port, hosting.drain_s)


def _deployment(hosting: Hosting, **placed: Any) -> Deployment:
    deployed: Deployment = serve.deployment(
        name="Endpoint",
        num_replicas=hosting.engines,
        # A backstop only: admission is the application's, which answers in OpenAI's shape.
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=hosting.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=2,
        **placed,
    )(serve.ingress()(Endpoint))
    return deployed


def start(
    engine: ActorHandle[Any] | Connect,
    model: ServedModel,
    hosting: Hosting | None = None,
    *,
    host: str,
    port: int,
) -> None:
    """Serve `model` at http://host:port; returns once the endpoint answers. Raises as prepare()."""
    prepare(host, port)
    serve.run(application(engine, model, hosting), name=_APPLICATION, route_prefix="/")


def prepare(host: str, port: int) -> None:
    """Start Ray Serve where it does not run, so that what is wrong is said before a model loads.

    Raises ConfigError, and leaves what runs alone, where the cluster already serves a kdray or its
    Ray Serve listens elsewhere.
    """
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    if _APPLICATION in serve.status().applications:
        raise ConfigError(
            "a kdray already runs on this Ray cluster: stop it first (ray job stop where a job "
            "serves it, else serve shutdown), or use another cluster"
        )
    if not _listens(host, port):
        raise ConfigError(
            f"Ray Serve already runs on this cluster and does not listen on {host}:{port}; "
            "its port was fixed when it started: give that one, or stop it (serve shutdown)"
        )


def _listens(host: str, port: int) -> bool:
    """Whether anything answers there within a few seconds."""
    address = ("127.0.0.1" if host == "0.0.0.0" else host, port)
    for _ in range(50):
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1.0):
            return True
        time.sleep(0.1)
    return False


def stop(*, leave_serve: bool = False) -> None:
    """Remove the endpoint, once its open requests have ended or its drain time is over.

    Ray Serve itself goes too, unless other applications run on it or it ends with its cluster
    anyhow (leave_serve).
    """
    serve.delete(_APPLICATION)
    if not leave_serve and not serve.status().applications:
        serve.shutdown()
