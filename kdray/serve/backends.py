"""Where an endpoint's engine comes from: another process has it, or the endpoint starts its own."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ray.actor import ActorHandle
from ray.util import get_current_placement_group

from kdray.actors.room import Room
from kdray.actors.supervised import SupervisedEngine
from kdray.config import LoadFormat
from kdray.engine import resolve
from kdray.errors import PlacementError
from kdray.serve.app import ServeLimits
from kdray.serve.arguments import Arguments
from kdray.serve.client import DriverClient
from kdray.serve.engine import EngineClient
from kdray.serve.keys import KeyRing, check_bind, is_loopback
from kdray.serve.replay import ReplayingClient

Connect = Callable[[], Awaitable[EngineClient]]
log = logging.getLogger("kdray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the endpoint serves: the id that clients write, where its tokenizer lies, who may use it
    and how much. load_format: as EngineConfig.load_format."""

    name: str
    tokenizer_folder: Path
    load_format: LoadFormat = "auto"
    limits: ServeLimits = field(default_factory=ServeLimits)
    keys: KeyRing = field(default_factory=KeyRing)


class Backend(Protocol):
    """Opened once, in the endpoint's process and event loop; closed when it has drained."""

    async def open(self) -> tuple[EngineClient, ServedModel]: ...

    async def close(self) -> None: ...


class Attached:
    """An engine that lives elsewhere and stays when the endpoint goes: a driver actor, or what a
    factory connects to."""

    def __init__(self, engine: ActorHandle[Any] | Connect, model: ServedModel) -> None:
        self._engine = engine
        self._model = model

    async def open(self) -> tuple[EngineClient, ServedModel]:
        if isinstance(self._engine, ActorHandle):
            return await DriverClient.connect(self._engine), self._model
        return await self._engine(), self._model

    async def close(self) -> None:
        pass


class Hosted:
    """An engine of the endpoint's own: its ranks sit in the bundles behind the endpoint's, and end
    with its process however that ends."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._engine: SupervisedEngine | None = None
        self._client: ReplayingClient | None = None

    async def open(self) -> tuple[EngineClient, ServedModel]:
        """Raises what Gang.start raises; Ray Serve then tries again a few times, and reports it."""
        arguments = self._arguments
        keys = self._keys()
        # Only files are looked at here, so on whichever device: no memory of a GPU is taken.
        facts = resolve(replace(arguments.config, device="cpu"))
        self._engine = await asyncio.to_thread(self._start)
        model = ServedModel(
            name=arguments.hosting.served_name or facts.name,
            tokenizer_folder=facts.target,
            load_format=arguments.config.load_format,
            limits=arguments.limits,
            keys=keys,
        )
        self._client = await ReplayingClient.connect(self._engine.supervisor)
        return self._client, model

    async def close(self) -> None:
        if self._client is not None:  # first, or it would report the end as a fault
            await self._client.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.stop)

    def _keys(self) -> KeyRing:
        """Raises ConfigError where Ray Serve listens to a network and nobody needs a key."""
        hosting, host = self._arguments.hosting, listening_host()
        keys = KeyRing.load(
            os.environ,
            api_key_file=hosting.api_key_file,
            admin_key_file=hosting.admin_key_file,
            local=is_loopback(host),
        )
        check_bind(host, keys, keyless=hosting.keyless)
        return keys

    def _start(self) -> SupervisedEngine:
        group = get_current_placement_group()
        if group is None:
            raise PlacementError("the endpoint has no placement group for its engine's ranks")
        config = self._arguments.config
        log.info("starting %s on %d rank(s)", config.model, config.tp)
        room = Room(group=group, first_bundle=1, owned=False)
        return SupervisedEngine.start(config, self._arguments.placement, room)


def listening_host() -> str:
    """Where Ray Serve's proxies listen, as this cluster was told."""
    # The only way to it in Ray 2.60; no public call tells a replica.
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    return str(client.http_config.host)
