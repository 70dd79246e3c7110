"""The gang: one actor a rank, placed together, started together, stopped together."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    GetTimeoutError,
    RayActorError,
    RayTaskError,
    RuntimeEnvSetupError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kdray.actors.driver_actor import DriverActor
from kdray.actors.placement import Placement
from kdray.actors.processes import RankProcess, end_processes
from kdray.actors.rendezvous import Rendezvous, remove_folder
from kdray.actors.room import Room, reserve, with_device
from kdray.actors.verifier_actor import CONTROL, VerifierActor
from kdray.config import EngineConfig
from kdray.errors import KdrayError, LinkError, StartupError
from kdray.verifier.links import P2P_OFF

_STOP_TIMEOUT_S = 15.0
_TASK_START_S = 60.0  # for Ray to start a process on another node
_GRACE_S = 2.0  # for Ray to end a sound process, which it then does not report as a crash
_log = logging.getLogger(__name__)


class Gang:
    """All ranks of one engine. They belong to the process that started them and end with it.

    driver      the driver actor's handle (kdray.actors.driver_actor.DriverActor)
    verifiers   the other ranks' handles, of rank 1 and on
    runs        their run() calls, which end with them
    info        what the driver said of itself once it was up
    processes   the process of each rank
    """

    driver: ActorHandle[Any]

    def __init__(
        self,
        config: EngineConfig,
        room: Room,
        placement: Placement,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """env: for the ranks' processes, beside what their places want."""
        self.info: dict[str, Any] = {}
        self.verifiers: list[ActorHandle[Any]] = []
        self.runs: list[Any] = []
        self.processes: list[RankProcess] = []
        self._config = config
        self._room = room
        self._placement = placement
        self._env = dict(env or {})
        self._rendezvous: Rendezvous | None = None

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank, by its number."""
        return {process.rank: process.pid for process in self.processes}

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
        room = room or reserve(config, placement)
        try:
            return cls._start_in(replace(room, owned=False), config, placement, room)
        except BaseException:
            room.release()
            raise

    @classmethod
    def _start_in(cls, held: Room, config: EngineConfig, placement: Placement, room: Room) -> Gang:
        """Where GPUs cannot reach one another directly, once more through the host's memory."""
        try:
            gang = cls._try(config, held, placement, {})
        except LinkError as error:
            if config.device != "cuda" or P2P_OFF in os.environ:
                raise
            _log.warning(
                "%s. Direct transfers between GPUs do not work on this host: an IOMMU that is not "
                "in passthrough, or ACS on the PCIe switches (cluster/README.md). Starting again "
                "with %s=1, which is slower",
                error,
                P2P_OFF,
            )
            gang = cls._try(config, held, placement, {P2P_OFF: "1"})
        gang._room = room
        return gang

    @classmethod
    def _try(
        cls, config: EngineConfig, room: Room, placement: Placement, env: dict[str, str]
    ) -> Gang:
        gang = cls(config, room, placement, env)
        try:
            gang._create_actors()
            gang._bring_up()
        except BaseException:
            gang.kill()
            raise
        return gang

    def stop(self) -> None:
        """Let the running step finish, tell every rank, then remove the actors."""
        with contextlib.suppress(Exception):
            ray.get(self.driver.stop.remote(), timeout=_STOP_TIMEOUT_S)
        with contextlib.suppress(Exception):
            ray.get(self.runs, timeout=_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End every process of the gang at once, and wait until it is gone with its GPU memory."""
        for actor in self._actors[::-1]:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        # Ray asks a process to end itself, which one that hangs or is stopped does not do.
        for left in self._end_processes():
            _log.warning("after the gang was killed: %s", left)
        self._room.release()

    @property
    def _actors(self) -> list[ActorHandle[Any]]:
        """Handles of all ranks that were created, by number."""
        return [self.driver, *self.verifiers] if hasattr(self, "driver") else []

    def _create_actors(self) -> None:
        # Ray's stubs type an actor class by its methods' own types, not as remote handles.
        remote: Any = ray.remote
        driver = remote(DriverActor)
        verifier = remote(concurrency_groups={CONTROL: 1})(VerifierActor)
        self.driver = driver.options(**self._options(0)).remote(self._config)
        for rank in range(1, self._config.tp):
            handle = verifier.options(**self._options(rank)).remote(self._config, rank)
            self.verifiers.append(handle)

    def _options(self, rank: int) -> dict[str, Any]:
        options = self._room.options(self._config, self._placement, rank)
        options["runtime_env"]["env_vars"] |= self._env
        return options

    def _bring_up(self) -> None:
        self._collect([actor.hello.remote() for actor in self._actors], self.processes.append)
        timeout = self._config.start_timeout_s
        rendezvous = _get(self.driver.open_rendezvous.remote(), timeout, "rank 0")
        self._rendezvous = rendezvous
        starts = [verifier.start.remote(rendezvous) for verifier in self.verifiers]
        self._collect([self.driver.start.remote(), *starts], lambda facts: None)
        self.info = _get(self.driver.info.remote(), timeout, "rank 0")
        self.runs = [verifier.run.remote() for verifier in self.verifiers]

    def _collect(self, calls: Sequence[Any], use: Callable[[Any], None]) -> None:
        """One call of each rank, by number; whoever fails first is raised."""
        timeout = self._config.start_timeout_s
        ranks = {call: rank for rank, call in enumerate(calls)}
        pending = list(calls)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=timeout)
            if not done:
                silent = ", ".join(f"rank {ranks[call]}" for call in pending)
                raise StartupError(f"{silent}: not up after {timeout:g} s (start_timeout_s)")
            use(_get(done[0], timeout, f"rank {ranks[done[0]]}"))

    def _end_processes(self) -> list[str]:
        """Where they run, which need not be here."""
        folder = self._rendezvous.folder if self._rendezvous is not None else None
        if not self.processes:
            return []
        timeout = self._config.faults.end_timeout_s
        node_id = self.processes[0].node_id
        if node_id == ray.get_runtime_context().get_node_id():
            return _clean_up(self.processes, folder, timeout)
        remote: Any = ray.remote
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        try:
            clean_up = remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_clean_up)
            call = clean_up.remote(self.processes, folder, timeout)
            left: list[str] = ray.get(call, timeout=timeout + _TASK_START_S)
            return left
        except Exception as error:  # the node may have gone with all of it
            return [f"node {node_id} does not say whether they are gone: {error}"]


def _clean_up(processes: list[RankProcess], folder: str | None, timeout_s: float) -> list[str]:
    """What is left of a gang goes: its processes and its rendezvous."""
    left = end_processes(processes, timeout_s, grace_s=_GRACE_S)
    if folder is not None:
        remove_folder(folder)
    return left


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
    except RuntimeEnvSetupError as error:
        said = str(error).strip().splitlines()[-1].strip()
        raise StartupError(
            f"{who}: Ray could not set up its process: {said} (--nsight needs nsys on the PATH "
            "of the Ray nodes)"
        ) from error
    except RayActorError as error:
        raise StartupError(f"{who}: its process ended while starting: {error}") from error
