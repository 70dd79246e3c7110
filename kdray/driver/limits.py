"""What an engine takes: its limits, and the requests that can never run within them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kdray.core.pages import PageAllocator
from kdray.core.request import Request
from kdray.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Facts the scheduler keeps to.

    max_requests     requests running at the same time
    max_model_len    most tokens of one request, prompt and output
    prefill_chunk    most prompt tokens in one step, over all requests
    vocab_size       token ids are below it
    """

    max_requests: int
    max_model_len: int
    prefill_chunk: int
    vocab_size: int


def refuse_what_never_runs(
    request: Request, limits: Limits, pages: PageAllocator, most_places: int
) -> None:
    """Raises InvalidRequest with the figures.

    most_places   token places the request can touch at its longest
    """
    for param, tokens in _tokens_named(request):
        if not all(0 <= token < limits.vocab_size for token in tokens):
            raise InvalidRequest(
                f"{param}: token ids must be from 0 to {limits.vocab_size - 1}", param=param
            )
    if request.max_total > limits.max_model_len:
        raise InvalidRequest(
            f"{len(request.prompt)} prompt tokens and max_tokens {request.sampling.max_tokens} "
            f"make {request.max_total}; the most this engine takes is {limits.max_model_len}",
            param="max_tokens",
        )
    needed = pages.pages_for(most_places)
    if needed > pages.num_pages:
        raise InvalidRequest(
            f"the request can grow to {needed} KV pages of {pages.page_size} tokens; the "
            f"engine has {pages.num_pages}",
            param="max_tokens",
        )


def _tokens_named(request: Request) -> Iterator[tuple[str, Iterable[int]]]:
    """Every list of token ids that a client wrote, under the client's name for it."""
    yield "prompt", request.tokens  # and what was delivered of its output
    yield "logit_bias", (token for token, _ in request.sampling.logit_bias)
    yield "stop_token_ids", request.sampling.stop_token_ids
