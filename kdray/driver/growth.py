"""What new tokens mean for a request: how many of them count, and whether they end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kdray.core.request import FinishReason, Request

_BROKEN = (
    "no finite logit is left to draw from; the model's weights or this request's input are broken"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one request gained in a step, after end tokens and limits were applied.

    accept_length   tokens gained by a speculative step: accepted drafts + 1, less where the request
                    ended before them; None where nothing was drafted
    error           why, where finish_reason is "error"
    """

    request_id: str
    token_ids: tuple[int, ...]
    accept_length: int | None
    finish_reason: FinishReason | None
    error: str | None = None


def grow(request: Request, tokens: Sequence[int], num_drafted: int) -> RequestOutput:
    """Append a step's tokens as far as they count; the caller retires who ended."""
    kept, reason = _until_end(request, tokens)
    request.tokens.extend(kept)
    accept_length = len(kept) if num_drafted else None
    if accept_length is not None:
        request.accept_lengths.append(accept_length)
    return RequestOutput(
        request_id=request.request_id,
        token_ids=tuple(kept),
        accept_length=accept_length,
        finish_reason=reason,
    )


def broken(request: Request) -> RequestOutput:
    """What a request says that has no logits left; the caller retires it."""
    return RequestOutput(
        request_id=request.request_id,
        token_ids=(),
        accept_length=None,
        finish_reason="error",
        error=f"request {request.request_id}: {_BROKEN}",
    )


def _until_end(request: Request, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """The tokens up to and including the first that ends the request, and why it ended."""
    room = request.max_total - len(request.tokens)
    if len(tokens) < room and request.end_token_ids.isdisjoint(tokens):
        return list(tokens), None
    first = request.num_output
    for index, token in enumerate(tokens[:room]):
        if token in request.end_token_ids and first + index + 1 > request.sampling.min_tokens:
            return list(tokens[: index + 1]), "stop"
    if len(tokens) >= room:
        return list(tokens[:room]), "length"
    return list(tokens), None
