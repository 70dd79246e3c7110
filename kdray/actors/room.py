"""The bundles a gang sits in: one a rank, all on one node."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kdray.actors.nsight import NSIGHT_OPTIONS
from kdray.actors.placement import Placement
from kdray.config import EngineConfig
from kdray.errors import PlacementError

STRATEGY = "STRICT_PACK"
_SILENT_S = 5.0  # of a wait for room; a longer one is worth a line
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The bundles that a gang's ranks sit in: rank r in bundle first_bundle + r.

    owned   made for the gang, so it goes with it; False: it belongs to whoever gave it
    """

    group: PlacementGroup
    first_bundle: int = 0
    owned: bool = True

    def options(self, config: EngineConfig, placement: Placement, rank: int) -> dict[str, Any]:
        """A rank's actor options: the same bundle every time; a rank never restarts alone."""
        return {
            "num_cpus": 1,
            "num_gpus": placement.bundle(config).get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.first_bundle + rank
            ),
            "runtime_env": {
                "env_vars": placement.env_vars(config, rank),
                **({"nsight": dict(NSIGHT_OPTIONS)} if config.nsight else {}),
            },
        }

    def release(self) -> None:
        """Give the bundles back, where they were the gang's own."""
        if self.owned:
            with contextlib.suppress(Exception):
                remove_placement_group(self.group)


def with_device(config: EngineConfig) -> EngineConfig:
    """The same device for all ranks, decided once: GPUs where the cluster has one for each."""
    if config.device != "auto":
        return config
    enough = ray.cluster_resources().get("GPU", 0) >= config.tp
    return replace(config, device="cuda" if enough else "cpu")


def reserve(config: EngineConfig, placement: Placement) -> Room:
    """A placement group of its own for a gang. Raises PlacementError where it does not fit."""
    placement.check(config)
    bundle = placement.bundle(config)
    total = ray.cluster_resources()
    # Of an accelerator's type a node offers 1, shared by all ranks.
    if any(total.get(kind, 0) < config.tp * amount for kind, amount in bundle.items()):
        raise PlacementError(f"{_lack(config, bundle)}. {_remedy(config)}")  # no wait can help
    group: PlacementGroup = placement_group([bundle] * config.tp, strategy=STRATEGY)
    longest = config.start_timeout_s
    silent = min(_SILENT_S, longest)
    if group.wait(silent):
        return Room(group=group)
    _log.warning("%s: waiting up to %g s (start_timeout_s)", _lack(config, bundle), longest)
    if group.wait(longest - silent):
        return Room(group=group)
    error = PlacementError(
        f"{_lack(config, bundle)} after {longest:g} s (start_timeout_s). End the endpoint or job "
        "that holds what is missing, or wait longer"
    )
    remove_placement_group(group)
    raise error


def _lack(config: EngineConfig, bundle: dict[str, float]) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    has = ", ".join(f"{total.get(k, 0):g} {k} ({free.get(k, 0):g} free)" for k in sorted(bundle))
    ranks = "1 rank needs" if config.tp == 1 else f"{config.tp} ranks need"
    return f"{ranks} {config.tp} x {bundle} on one node; the cluster has {has}"


def _remedy(config: EngineConfig) -> str:
    fewer = "Lower tp" if config.tp > 1 else "Add a node"
    if config.device == "cuda":
        return f"{fewer}, or take device cpu"
    return f"{fewer}, or let ray start count more cores (--num-cpus)"
