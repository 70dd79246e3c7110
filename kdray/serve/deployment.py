"""The application as a Ray Serve deployment: one replica, which speaks to one driver actor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI
from ray import serve
from ray.actor import ActorHandle
from ray.serve import Application

from kdray.errors import EngineClosed
from kdray.model.tokenizer import Tokenizer
from kdray.serve.app import ServeLimits, build_app
from kdray.serve.client import DriverClient
from kdray.serve.engine import EngineClient

_APPLICATION = "kdray"
Connect = Callable[[], Awaitable[EngineClient]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the endpoint serves: the id that clients write, and where its tokenizer lies."""

    name: str
    tokenizer_folder: Path
    limits: ServeLimits = field(default_factory=ServeLimits)


@serve.deployment(
    name="Endpoint",
    num_replicas=1,
    # A backstop only: admission is the application's, which answers in OpenAI's shape.
    max_ongoing_requests=4096,
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=5,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=60,
    max_constructor_retry_count=2,
)
@serve.ingress()
class Endpoint:
    """Builds the application in its own process, so that engine and event loop are its own."""

    async def __init__(self, engine: ActorHandle | Connect, model: ServedModel) -> None:
        self._engine = await _connected(engine)
        self._tokenizer = Tokenizer.from_folder(model.tokenizer_folder)
        self._model = model

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve in the replica, behind the constructor."""
        return build_app(self._engine, self._tokenizer, self._model.name, self._model.limits)

    async def check_health(self) -> None:
        """Ray Serve replaces a replica that raises here."""
        cause = self._engine.healthy()
        if cause is not None:
            raise EngineClosed(cause)


async def _connected(engine: ActorHandle | Connect) -> EngineClient:
    if isinstance(engine, ActorHandle):
        return await DriverClient.connect(engine)
    return await engine()


def application(engine: ActorHandle | Connect, model: ServedModel) -> Application:
    """The deployment bound to a driver actor, or to a factory that is awaited in the replica."""
    return Endpoint.bind(engine, model)


def start(engine: ActorHandle | Connect, model: ServedModel, *, host: str, port: int) -> None:
    """Serve `model` at http://host:port; returns once the endpoint answers."""
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    serve.run(application(engine, model), name=_APPLICATION, route_prefix="/")


def stop() -> None:
    """Remove the endpoint, once its open requests have ended or the grace is over.

    Ray Serve itself stays where other applications run on it.
    """
    serve.delete(_APPLICATION)
    if not serve.status().applications:
        serve.shutdown()
