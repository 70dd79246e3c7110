"""A profile: what a user asks to be recorded, and what every rank is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

from kdray.errors import ConfigError

# As SGLang spells them. CUDA_PROFILER marks a range for Nsight Systems instead of recording.
Activity = Literal["CPU", "GPU", "MEM", "CUDA_PROFILER"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
MAX_STEPS = 1000  # a browser opens a trace of some hundred megabytes, no more
DEFAULT_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What a user asks for.

    num_steps       engine steps to record; it ends earlier where it is told to stop
    activities      what is recorded; none: CPU, and GPU where the ranks have one
    with_stack      Python stacks of every operation: large files, slow steps
    record_shapes   shapes of every operation's inputs
    """

    num_steps: int = DEFAULT_STEPS
    activities: frozenset[Activity] = field(default_factory=frozenset)
    with_stack: bool = False
    record_shapes: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_steps <= MAX_STEPS:
            raise ConfigError(f"num_steps must be from 1 to {MAX_STEPS}, got {self.num_steps}")
        unknown = sorted(set(self.activities) - set(ACTIVITIES))
        if unknown:
            raise ConfigError(f"activities must be among {', '.join(ACTIVITIES)}, got {unknown}")
        if "CUDA_PROFILER" in self.activities and len(self.activities) > 1:
            raise ConfigError(
                "CUDA_PROFILER leaves the recording to Nsight Systems, and two recorders cannot "
                "hold one GPU: ask for it alone"
            )

    def resolved(self, *, on_gpu: bool, under_nsight: bool) -> ProfileOptions:
        """The activities that these ranks can record; ConfigError where they cannot."""
        asked = self.activities
        if under_nsight and on_gpu:
            if not asked <= {"CUDA_PROFILER"}:
                raise ConfigError(
                    "the ranks run under Nsight Systems, which holds the GPU's tracing: leave "
                    "activities out, or start without --nsight"
                )
            return self._with({"CUDA_PROFILER"})
        if not on_gpu and (under_nsight or asked & {"GPU", "CUDA_PROFILER"}):
            raise ConfigError(
                "the ranks have no GPU: activities can be CPU and MEM, and --nsight has no use"
            )
        return self._with(asked or ({"CPU", "GPU"} if on_gpu else {"CPU"}))

    def _with(self, activities: Iterable[Activity]) -> ProfileOptions:
        return ProfileOptions(
            num_steps=self.num_steps,
            activities=frozenset(activities),
            with_stack=self.with_stack,
            record_shapes=self.record_shapes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOrder:
    """What a rank is told: record this from the next step on, into that folder.

    folder   absolute, made by rank 0; the ranks of a gang share one host
    """

    options: ProfileOptions
    folder: str

    @property
    def flags(self) -> int:
        """All that a rank needs of the options, as bits; the driver counts the steps."""
        options = self.options
        bits = [activity in options.activities for activity in ACTIVITIES]
        bits += [options.with_stack, options.record_shapes]
        return sum(1 << i for i, is_set in enumerate(bits) if is_set)

    @classmethod
    def from_flags(cls, flags: int, folder: str) -> Self:
        count = len(ACTIVITIES)
        options = ProfileOptions(
            activities=frozenset(a for i, a in enumerate(ACTIVITIES) if flags >> i & 1),
            with_stack=bool(flags >> count & 1),
            record_shapes=bool(flags >> count + 1 & 1),
        )
        return cls(options=options, folder=folder)
