"""An engine with a supervisor above it, as jobs and endpoints start and stop it."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from kdray.actors.placement import Placement
from kdray.actors.room import Room, reserve, with_device
from kdray.actors.supervisor import Supervisor
from kdray.config import EngineConfig
from kdray.errors import GangError, KdrayError

_STOP_TIMEOUT_S = 90.0


class SupervisedEngine:
    """An engine that outlives its gangs, as the process sees it that started it.

    supervisor   the handle that clients connect to (kdray.serve.replay.ReplayingClient)
    info         what the first gang said of itself; it holds for all of them
    """

    def __init__(self, supervisor: ActorHandle[Any], room: Room) -> None:
        self.supervisor = supervisor
        self.info: dict[str, Any] = {}
        self._room = room

    @classmethod
    def start(
        cls, config: EngineConfig, placement: Placement | None = None, room: Room | None = None
    ) -> SupervisedEngine:
        """As Gang.start, with a supervisor above. Ends with the calling process."""
        config, placement = with_device(config), placement or Placement()
        # Made here: Ray would keep what a dead supervisor had made until the whole job ends.
        room = room or reserve(config, placement)
        remote: Any = ray.remote
        actor = remote(num_cpus=0, max_restarts=0)(Supervisor)
        supervisor: Any = actor.remote(config, placement, room)
        engine = cls(supervisor, room)
        try:
            engine.info = ray.get(supervisor.start.remote())
        except RayTaskError as error:
            engine.kill()
            raise (error.cause if isinstance(error.cause, KdrayError) else error) from None
        except RayActorError as error:
            engine.kill()
            raise GangError(f"the supervisor ended while starting: {error}") from error
        except BaseException:
            engine.kill()
            raise
        return engine

    def stop(self) -> None:
        """Let the running step finish, end all ranks, then the supervisor."""
        with contextlib.suppress(Exception):
            ray.get(self.supervisor.stop.remote(), timeout=_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the supervisor, and so all ranks."""
        with contextlib.suppress(Exception):
            ray.kill(self.supervisor)
        self._room.release()
