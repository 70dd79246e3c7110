"""What the HTTP surface needs of an engine: submit, read, abort, and a few facts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

from kdray.core.events import EventCounters
from kdray.core.profile import ProfileOptions
from kdray.core.request import SamplingParams
from kdray.driver.step_loop import DriverStats


class EngineClient(Protocol):
    """An engine as the surface sees it: token ids in, one delta per step out."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def events(self) -> EventCounters:
        """Faults so far, for the metrics page."""
        ...

    @property
    def profiles(self) -> ProfileControl:
        """Profiles of the engine that runs now."""
        ...

    async def submit(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        """Queue a request. InvalidRequest: it can never run; EngineClosed, GangError: none can."""

    def outputs(self, request_id: str) -> AsyncIterator[RequestDelta]:
        """A submitted request's steps, in order; ends after the delta with a finish reason."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request and free what it holds; nothing happens where it is unknown."""

    async def stats(self) -> DriverStats: ...

    def healthy(self) -> str | None:
        """None, or why the engine cannot serve."""


class ProfileControl(Protocol):
    """Profiles of all ranks: one at a time, found again by name. Statuses are plain values."""

    async def start(self, options: ProfileOptions) -> dict[str, Any]:
        """Record from the next step on. Raises ConfigError or ProfileConflict."""
        ...

    async def stop(self) -> dict[str, Any]:
        """End it and wait for its files. Raises ProfileConflict where none was started."""
        ...

    async def names(self) -> list[str]: ...

    async def status(self, name: str) -> dict[str, Any]:
        """Raises KeyError where there is no such profile."""
        ...

    async def read(self, name: str, file: str) -> bytes:
        """Raises KeyError where there is no such file."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts that hold while the engine lives.

    name            the model as the engine calls it
    max_model_len   longest prompt + output, in tokens
    end_token_ids   tokens that end an output unless ignore_eos
    mode, budget    how it speculates: kdray.config.EngineConfig
    ranks           tensor-parallel ranks
    load_format, synthetic_acceptance   as EngineConfig's: what is no model's text says so
    """

    name: str
    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    mode: str
    budget: int
    ranks: int
    load_format: str = "auto"
    synthetic_acceptance: Mapping[str, Any] | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        known = _known(cls, values)
        return cls(**known | {"end_token_ids": tuple(known["end_token_ids"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDelta:
    """What one step gave one request.

    token_ids       every token gained, in order
    accept_length   accepted drafts + 1; None where nothing was drafted, as in a prefill
    finish_reason   None, "stop", "length" or "error"
    error           why, where finish_reason is "error"
    lost            the engine went, not the request: another engine could go on with it
    """

    token_ids: tuple[int, ...]
    accept_length: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    lost: bool = False


def _known(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(cls)}
    return {name: value for name, value in values.items() if name in names}
