"""One user's ask and its progress."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from kdray.errors import InvalidRequest

# "stop" or "length", as in OpenAI's API; "error" where the request itself is broken; "abort" where
# nobody waits any more.
FinishReason = str
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when to stop.

    temperature          0 is greedy; otherwise logits are divided by it
    top_k                keep the k largest; 0: all
    top_p                keep the smallest set whose probability reaches p; 1: all
    min_p                keep tokens of at least min_p times the largest probability; 0: all
    presence_penalty     subtracted once from every token of the output so far
    frequency_penalty    subtracted for each occurrence in the output so far
    repetition_penalty   divides positive and multiplies negative logits of tokens seen in prompt or
                         output; 1: off
    logit_bias           (token id, value) pairs added to the logits
    seed                 addresses the noise; None: the engine draws one
    stop                 strings that end the text (applied where the text is made)
    stop_token_ids       tokens that end the output, besides the model's own end tokens
    ignore_eos           run on past the model's own end tokens
    min_tokens           end tokens are not drawn before this many output tokens
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be greater than 0", param="top_p")
        if self.seed is not None:
            _check_range("seed", self.seed, 0, MAX_SEED)
        for _, value in self.logit_bias:
            _check_range("logit_bias", value, -100.0, 100.0)

    @property
    def uses_history(self) -> bool:
        """True where a row's logits depend on the tokens before it."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.min_tokens > 0
        )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}", param=name)


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One request in the engine. Owned and changed by the scheduler alone.

    tokens          prompt, then output; the last one is the root once the prompt is cached
    num_cached      tokens whose KV is stored: tokens[:num_cached]
    end_token_ids   the model's end tokens and the request's own stop tokens
    seed            addresses the noise of every token of this request
    accept_lengths  tokens gained by each speculative step (accepted drafts + 1, less at the end)
    runs_ahead      its draws ask nothing of the host, and the engine runs such requests ahead of it
    num_in_flight   steps that run ahead of the host and whose tokens are not here yet
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    end_token_ids: frozenset[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    slot: int | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    accept_lengths: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    runs_ahead: bool = False
    num_in_flight: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if not self.tokens:
            self.tokens = list(self.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def num_uncached(self) -> int:
        """Known tokens without KV; 1 (the root) between two decoding steps."""
        return len(self.tokens) - self.num_cached

    @property
    def max_total(self) -> int:
        """Most tokens this request can ever hold, prompt included."""
        return len(self.prompt) + self.sampling.max_tokens
