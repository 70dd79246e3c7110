"""Where an endpoint's engine comes from: another process has it, or the endpoint starts its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ray.actor import ActorHandle
from ray.util import get_current_placement_group

from kdray.actors.gang import Gang
from kdray.actors.room import Room
from kdray.engine import resolve
from kdray.errors import PlacementError
from kdray.serve.app import ServeLimits
from kdray.serve.arguments import Arguments
from kdray.serve.client import DriverClient
from kdray.serve.engine import EngineClient

Connect = Callable[[], Awaitable[EngineClient]]
log = logging.getLogger("kdray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the endpoint serves: the id that clients write, and where its tokenizer lies."""

    name: str
    tokenizer_folder: Path
    limits: ServeLimits = field(default_factory=ServeLimits)


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
        self._gang: Gang | None = None

    async def open(self) -> tuple[EngineClient, ServedModel]:
        """Raises what Gang.start raises; Ray Serve then tries again a few times, and reports it."""
        arguments = self._arguments
        # Only files are looked at here, so on whichever device: no memory of a GPU is taken.
        facts = resolve(replace(arguments.config, device="cpu"))
        self._gang = await asyncio.to_thread(self._start)
        model = ServedModel(
            name=arguments.hosting.served_name or facts.name,
            tokenizer_folder=facts.target,
            limits=arguments.limits,
        )
        return await DriverClient.connect(self._gang.driver), model

    async def close(self) -> None:
        gang, self._gang = self._gang, None
        if gang is not None:
            await asyncio.to_thread(gang.stop)

    def _start(self) -> Gang:
        group = get_current_placement_group()
        if group is None:
            raise PlacementError("the endpoint has no placement group for its engine's ranks")
        log.info("starting %s on %d rank(s)", self._arguments.config.model, self._ranks)
        room = Room(group=group, first_bundle=1, owned=False)
        return Gang.start(self._arguments.config, self._arguments.placement, room)

    @property
    def _ranks(self) -> int:
        return self._arguments.config.tp
