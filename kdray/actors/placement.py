"""What a gang asks of the cluster: its GPUs by kind and by number."""

from __future__ import annotations

from dataclasses import dataclass

from kdray.config import EngineConfig
from kdray.errors import ConfigError

_QUIET_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}
_TYPE_SHARE = 0.001  # a node offers 1 of its accelerator's type; asking for a little binds to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a gang asks of the cluster beyond one GPU a rank; nothing of it counts on a CPU.

    accelerator_type   as Ray names it, "RTX-PRO-6000" or "H200"; None: any
    gpus               the GPU of each rank by its number on the node: skips a sick card, or orders
                       ranks along the PCIe tree. For a node that this engine has to itself, as Ray
                       does not know of the choice. None: Ray's choice
    """

    accelerator_type: str | None = None
    gpus: tuple[int, ...] | None = None

    def check(self, config: EngineConfig) -> None:
        """ConfigError where `gpus` cannot seat the ranks."""
        if self.gpus is None:
            return
        if len(self.gpus) != config.tp or len(set(self.gpus)) != config.tp or min(self.gpus) < 0:
            raise ConfigError(
                f"gpus must name {config.tp} different GPUs, one for each of tp's ranks; "
                f"got {list(self.gpus)}"
            )

    def bundle(self, config: EngineConfig) -> dict[str, float]:
        """What one rank takes; the device must have been decided."""
        if config.device != "cuda":
            return {"CPU": 1}
        bundle: dict[str, float] = {"CPU": 1, "GPU": 1}
        if self.accelerator_type is not None:
            bundle[f"accelerator_type:{self.accelerator_type}"] = _TYPE_SHARE
        return bundle

    def env_vars(self, config: EngineConfig, rank: int) -> dict[str, str]:
        """The environment of a rank's process."""
        if self.gpus is None or config.device != "cuda":
            return _QUIET_ENV
        return _QUIET_ENV | {
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "CUDA_VISIBLE_DEVICES": str(self.gpus[rank]),
        }
