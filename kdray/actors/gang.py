"""The gang: one actor a rank, placed together, started together, stopped together."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from kdray.actors.driver_actor import DriverActor
from kdray.actors.placement import Placement
from kdray.actors.rendezvous import Rendezvous, remove_folder
from kdray.actors.room import Room, reserve, with_device
from kdray.actors.verifier_actor import VerifierActor
from kdray.config import EngineConfig
from kdray.errors import KdrayError, StartupError

_STOP_TIMEOUT_S = 15.0


class Gang:
    """All ranks of one engine. They belong to the process that started them and end with it.

    driver   the driver actor's handle (kdray.actors.driver_actor.DriverActor)
    info     what the driver said of itself once it was up
    pids     the process of each rank
    """

    driver: ActorHandle[Any]

    def __init__(self, room: Room, placement: Placement) -> None:
        self.info: dict[str, Any] = {}
        self.pids: dict[int, int] = {}
        self._room = room
        self._placement = placement
        self._actors: list[ActorHandle[Any]] = []
        self._runs: list[Any] = []
        self._rendezvous: Rendezvous | None = None

    @classmethod
    def start(
        cls, config: EngineConfig, placement: Placement | None = None, room: Room | None = None
    ) -> Gang:
        """Place and start all ranks of an engine on the running Ray cluster.

        `room`: bundles that are held already; else a placement group is made, which goes with the
        gang. Returns when it serves. Raises PlacementError, StartupError, ConfigError or
        CheckpointError, and then leaves no actor and no placement group of its own behind.
        """
        config, placement = with_device(config), placement or Placement()
        gang = cls(room or reserve(config, placement), placement)
        try:
            gang._create_actors(config)
            gang._bring_up(config)
        except BaseException:
            gang.kill()
            raise
        return gang

    def stop(self) -> None:
        """Let the running step finish, tell every rank, then remove the actors."""
        with contextlib.suppress(Exception):
            ray.get(self.driver.stop.remote(), timeout=_STOP_TIMEOUT_S)
        with contextlib.suppress(Exception):
            ray.get(self._runs, timeout=_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End every process of the gang at once."""
        for actor in self._actors[::-1]:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        self._room.release()
        if self._rendezvous is not None:
            remove_folder(self._rendezvous.folder)

    def _create_actors(self, config: EngineConfig) -> None:
        # Ray's stubs type an actor class by its methods' own types, not as remote handles.
        driver: Any = ray.remote(DriverActor)
        verifier: Any = ray.remote(VerifierActor)
        self.driver = driver.options(**self._options(config, 0)).remote(config)
        self._actors.append(self.driver)
        for rank in range(1, config.tp):
            options = self._options(config, rank)
            self._actors.append(verifier.options(**options).remote(config, rank))

    def _options(self, config: EngineConfig, rank: int) -> dict[str, Any]:
        return self._room.options(config, self._placement, rank)

    def _bring_up(self, config: EngineConfig) -> None:
        timeout = config.start_timeout_s
        rendezvous = _get(self.driver.open_rendezvous.remote(), timeout, "rank 0")
        self._rendezvous = rendezvous
        ranks = {self.driver.start.remote(): 0}
        for rank, verifier in enumerate(self._actors[1:], start=1):
            ranks[verifier.start.remote(rendezvous)] = rank
        pending = list(ranks)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=timeout)
            if not done:
                silent = ", ".join(f"rank {ranks[ref]}" for ref in pending)
                raise StartupError(f"{silent}: not up after {timeout:g} s (start_timeout_s)")
            rank = ranks[done[0]]
            facts = _get(done[0], timeout, f"rank {rank}")
            self.pids[rank] = facts["pid"]
            if rank == 0:
                self.info = facts
        self._runs = [verifier.run.remote() for verifier in self._actors[1:]]


def _get(ref: Any, timeout: float, who: str) -> Any:
    """A start-up result, or kdray's own error with the rank in front of the cause."""
    try:
        return ray.get(ref, timeout=timeout)
    except GetTimeoutError:
        raise StartupError(f"{who}: no answer after {timeout:g} s (start_timeout_s)") from None
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, KdrayError):
            raise cause from None
        raise StartupError(f"{who}: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise StartupError(f"{who}: its process ended while starting: {error}") from error
