"""What the HTTP surface needs of an engine: submit, read, abort, and a few facts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

from kdray.core.request import SamplingParams


class EngineClient(Protocol):
    """An engine as the surface sees it: token ids in, one delta per step out."""

    @property
    def info(self) -> EngineInfo: ...

    async def submit(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        """Queue a request. InvalidRequest: it can never run; EngineClosed, GangError: none can."""

    def outputs(self, request_id: str) -> AsyncIterator[RequestDelta]:
        """A submitted request's steps, in order; ends after the delta with a finish reason."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request and free what it holds; nothing happens where it is unknown."""

    async def stats(self) -> EngineStats: ...

    def healthy(self) -> str | None:
        """None, or why the engine cannot serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts that hold while the engine lives.

    name            the model as the engine calls it
    max_model_len   longest prompt + output, in tokens
    end_token_ids   tokens that end an output unless ignore_eos
    mode, budget    how it speculates: kdray.config.EngineConfig
    ranks           tensor-parallel ranks
    """

    name: str
    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    mode: str
    budget: int
    ranks: int

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
    """

    token_ids: tuple[int, ...]
    accept_length: int | None = None
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started, and gauges of this moment.

    accept_lengths   accept length -> speculative steps of single requests that gained so many
    stage_seconds    verb (schedule, draft, build, verify, accept, commit) -> wall-clock seconds
    verified_rows    rows the target ran: known tokens and draft nodes
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    verified_rows: int = 0
    preemptions: int = 0
    accept_lengths: Mapping[int, int] = field(default_factory=dict)
    stage_seconds: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        return cls(**_known(cls, values))


def _known(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(cls)}
    return {name: value for name, value in values.items() if name in names}
