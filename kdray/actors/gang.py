"""The gang: one actor a rank, placed together, started together, stopped together."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kdray.actors.driver_actor import DriverActor
from kdray.actors.verifier_actor import VerifierActor
from kdray.config import EngineConfig
from kdray.errors import KdrayError, PlacementError, StartupError

_STOP_TIMEOUT_S = 15.0
_QUIET_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}


class Gang:
    """All ranks of one engine. They belong to the process that started them and end with it.

    driver   the driver actor's handle (kdray.actors.driver_actor.DriverActor)
    info     what the driver said of itself once it was up
    """

    def __init__(
        self, group: PlacementGroup, driver: ActorHandle[Any], verifiers: list[ActorHandle[Any]]
    ) -> None:
        self.driver = driver
        self.info: dict[str, Any] = {}
        self._group = group
        self._verifiers = verifiers
        self._runs: list[Any] = []

    @classmethod
    def start(cls, config: EngineConfig) -> Gang:
        """Place and start all ranks of an engine on the running Ray cluster.

        Returns when it serves. Raises PlacementError, StartupError, ConfigError or CheckpointError,
        and then leaves no actor and no placement group behind.
        """
        config = _with_device(config)
        group = _place(config)
        gang = cls(group, *_create_actors(config, group))
        try:
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
        for actor in (*self._verifiers, self.driver):
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        with contextlib.suppress(Exception):
            remove_placement_group(self._group)

    def _bring_up(self, config: EngineConfig) -> None:
        timeout = config.start_timeout_s
        rendezvous = _get(self.driver.open_rendezvous.remote(), timeout, "rank 0")
        names = {self.driver.start.remote(): "rank 0"}
        for rank, verifier in enumerate(self._verifiers, start=1):
            names[verifier.start.remote(rendezvous)] = f"rank {rank}"
        pending = list(names)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=timeout)
            if not done:
                silent = ", ".join(names[ref] for ref in pending)
                raise StartupError(f"{silent}: not up after {timeout:g} s (start_timeout_s)")
            result = _get(done[0], timeout, names[done[0]])
            self.info = result if isinstance(result, dict) else self.info
        self._runs = [verifier.run.remote() for verifier in self._verifiers]


def _with_device(config: EngineConfig) -> EngineConfig:
    """The same device for all ranks, decided once: GPUs where the cluster has one for each."""
    if config.device != "auto":
        return config
    enough = ray.cluster_resources().get("GPU", 0) >= config.tp
    return replace(config, device="cuda" if enough else "cpu")


def _bundle(config: EngineConfig) -> dict[str, float]:
    return {"CPU": 1, "GPU": 1} if config.device == "cuda" else {"CPU": 1}


def _place(config: EngineConfig) -> PlacementGroup:
    bundles = [_bundle(config) for _ in range(config.tp)]
    group = placement_group(bundles, strategy="STRICT_PACK")
    if group.wait(config.start_timeout_s):
        return group
    total, free = ray.cluster_resources(), ray.available_resources()
    remove_placement_group(group)
    kinds = sorted(_bundle(config))
    has = ", ".join(f"{total.get(k, 0):g} {k} ({free.get(k, 0):g} free)" for k in kinds)
    raise PlacementError(
        f"{config.tp} ranks need {config.tp} x {_bundle(config)} on one node; "
        f"the cluster has {has} after {config.start_timeout_s:g} s (start_timeout_s). "
        "Lower --tp or free the resources"
    )


def _create_actors(
    config: EngineConfig, group: PlacementGroup
) -> tuple[ActorHandle[Any], list[ActorHandle[Any]]]:
    def options(rank: int) -> dict[str, Any]:
        return {
            "num_cpus": 1,
            "num_gpus": _bundle(config).get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            ),
            "runtime_env": {"env_vars": _QUIET_ENV},
        }

    driver = ray.remote(DriverActor).options(**options(0)).remote(config)
    verifier = ray.remote(VerifierActor)
    others = [
        verifier.options(**options(rank)).remote(config, rank) for rank in range(1, config.tp)
    ]
    return driver, others


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
