"""The application as a Ray Serve deployment: one replica, which speaks to one driver actor."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.actor import ActorHandle
from ray.serve import Application, Deployment

from kdray.errors import ConfigError, EngineClosed
from kdray.model.tokenizer import Tokenizer
from kdray.serve.app import ServeLimits, build_app
from kdray.serve.client import DriverClient
from kdray.serve.engine import EngineClient

Connect = Callable[[], Awaitable[EngineClient]]
Engine = ActorHandle[Any] | Connect

MAX_ONGOING_REQUESTS = 4096
DRAIN_S = 60.0
_APPLICATION = "kdray"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the endpoint serves: the id that clients write, and where its tokenizer lies."""

    name: str
    tokenizer_folder: Path
    limits: ServeLimits = field(default_factory=ServeLimits)


class Endpoint:
    """Connects and builds the application in the replica's process, in its own event loop."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self._connect = _connector(engine)
        self._model = model
        self._engine: EngineClient | None = None

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve once, behind the constructor."""
        tokenizer = Tokenizer.from_folder(self._model.tokenizer_folder)
        self._engine = await self._connect()
        return build_app(self._engine, tokenizer, self._model.name, self._model.limits)

    async def check_health(self) -> None:
        """Ray Serve replaces a replica that raises here."""
        cause = self._engine.healthy() if self._engine is not None else "not connected yet"
        if cause is not None:
            raise EngineClosed(cause)


def _connector(engine: Engine) -> Connect:
    if isinstance(engine, ActorHandle):
        return lambda: DriverClient.connect(engine)
    return engine


def application(engine: Engine, model: ServedModel) -> Application:
    """The deployment bound to a driver actor, or to a factory that is awaited in the replica."""
    deployed: Deployment = serve.deployment(
        name="Endpoint",
        num_replicas=1,
        # A backstop only: admission is the application's, which answers in OpenAI's shape.
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=2,
    )(serve.ingress()(Endpoint))
    return deployed.bind(engine, model)


def start(engine: Engine, model: ServedModel, *, host: str, port: int) -> None:
    """Serve `model` at http://host:port; returns once the endpoint answers.

    Raises ConfigError, and leaves what runs alone, where the cluster already serves a kdray or its
    Ray Serve listens elsewhere.
    """
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    if _APPLICATION in serve.status().applications:
        raise ConfigError(
            "a kdray already runs on this Ray cluster: stop its job first, or use another cluster"
        )
    if not _listens(host, port):
        raise ConfigError(
            f"Ray Serve already runs on this cluster and does not listen on {host}:{port}; "
            "its port was fixed when it started: give that one, or stop it (serve shutdown)"
        )
    serve.run(application(engine, model), name=_APPLICATION, route_prefix="/")


def _listens(host: str, port: int) -> bool:
    """Whether anything answers there within a few seconds."""
    address = ("127.0.0.1" if host == "0.0.0.0" else host, port)
    for _ in range(50):
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1.0):
            return True
        time.sleep(0.1)
    return False


def stop(*, leave_serve: bool = False) -> None:
    """Remove the endpoint, once its open requests have ended or DRAIN_S is over.

    Ray Serve itself goes too, unless other applications run on it or it ends with its cluster
    anyhow (leave_serve).
    """
    serve.delete(_APPLICATION)
    if not leave_serve and not serve.status().applications:
        serve.shutdown()
