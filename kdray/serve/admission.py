"""Who may come in: bounds on the queue by outputs and by tokens, answered with 429."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kdray.errors import InvalidRequest
from kdray.serve.failure import BUSY, Failure, Refused
from kdray.serve.generation import Choice
from kdray.serve.metrics import ServiceMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """Where a request is turned away.

    max_body_bytes      largest body; beyond it 413
    max_choices         most outputs of one request, prompts times n; beyond it 400
    max_open_choices    most outputs running or waiting at the same time; beyond it 429
    max_queued_choices  most outputs that wait for their first token; beyond it 429
    max_queued_tokens   most prompt tokens of those; beyond it 429
    deadline_s          longest time a request may take, then 408; None: as long as it takes
    """

    max_body_bytes: int = 8 << 20
    max_choices: int = 128
    max_open_choices: int = 4096
    max_queued_choices: int = 1024
    max_queued_tokens: int = 1 << 20
    deadline_s: float | None = None


def check_choices(num_choices: int, limits: ServeLimits, *, param: str) -> None:
    """InvalidRequest where one request asks for more outputs than any may."""
    if num_choices > limits.max_choices:
        raise InvalidRequest(
            f"{num_choices} outputs asked for; at most {limits.max_choices} a request", param=param
        )


def check_room(num_choices: int, limits: ServeLimits, counts: ServiceMetrics) -> None:
    """Refused, with 429, where the outputs find no place: before their prompts cost anything."""
    if counts.open_choices + num_choices > limits.max_open_choices:
        raise _busy(
            f"{counts.open_choices} outputs are open, of at most {limits.max_open_choices}", counts
        )
    if counts.queued_choices + num_choices > limits.max_queued_choices:
        raise _busy(
            f"{counts.queued_choices} outputs are queued, of at most {limits.max_queued_choices}",
            counts,
        )


def check_tokens(choices: Sequence[Choice], limits: ServeLimits, counts: ServiceMetrics) -> None:
    """The same by prompt tokens. InvalidRequest where they find no place in an empty queue."""
    tokens = sum(len(choice.prompt) for choice in choices)
    if tokens > limits.max_queued_tokens:
        raise InvalidRequest(
            f"the request's outputs have {tokens} prompt tokens in all; this server takes at most "
            f"{limits.max_queued_tokens} at a time",
            param="prompt",
        )
    if counts.queued_tokens + tokens > limits.max_queued_tokens:
        raise _busy(
            f"{counts.queued_tokens} prompt tokens are queued, {tokens} more exceed the most, "
            f"{limits.max_queued_tokens}",
            counts,
        )


def _busy(message: str, counts: ServiceMetrics) -> Refused:
    return Refused(
        Failure(
            status=429,
            message=f"{message}; try again later",
            kind=BUSY,
            code="too_many_requests",
            headers={"Retry-After": str(math.ceil(counts.retry_after_s()))},
        )
    )
