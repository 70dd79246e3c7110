"""Tokens of one choice to text: partial UTF-8 held back, stop strings cut exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kdray.core.request import SamplingParams
from kdray.model.tokenizer import StopMatcher, StreamDecoder, Tokenizer
from kdray.serve.engine import RequestDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStep:
    """What one engine step gave one choice.

    text            new text, complete characters only
    num_tokens      tokens it took; those behind a stop string do not count
    accept_length   as in RequestDelta
    finish_reason   None, "stop" or "length"
    """

    index: int
    text: str
    num_tokens: int
    accept_length: int | None
    finish_reason: str | None


class ChoiceText:
    """Turns one choice's deltas into steps of text; says "stop" where a stop string appeared."""

    def __init__(self, index: int, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._index = index
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(sampling.stop) if sampling.stop else None
        self._unwritten = frozenset(sampling.stop_token_ids)

    def feed(self, delta: RequestDelta) -> ChoiceStep:
        tokens = self._written(delta)
        text, used, stopped = self._read(tokens)
        num_tokens = used if stopped else len(delta.token_ids)
        reason = "stop" if stopped else delta.finish_reason
        if reason is not None and not stopped:
            rest, stopped = self._flush()
            text += rest
            reason = "stop" if stopped else reason
        return ChoiceStep(
            index=self._index,
            text=text,
            num_tokens=num_tokens,
            accept_length=delta.accept_length,
            finish_reason=reason,
        )

    def _written(self, delta: RequestDelta) -> tuple[int, ...]:
        """The tokens that become text: a stop token that ended the output does not."""
        tokens = delta.token_ids
        ended = delta.finish_reason == "stop" and bool(tokens) and tokens[-1] in self._unwritten
        return tokens[:-1] if ended else tokens

    def _read(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """Text, tokens taken, and whether a stop string ended it."""
        if self._matcher is None:
            return self._decoder.feed(tokens), len(tokens), False
        text = ""
        # One at a time: usage must not depend on how many tokens a step happened to bring.
        for used, token in enumerate(tokens, start=1):
            emitted, stopped = self._matcher.feed(self._decoder.feed([token]))
            text += emitted
            if stopped:
                return text, used, True
        return text, len(tokens), False

    def _flush(self) -> tuple[str, bool]:
        """What was held back, at the end of the output."""
        rest = self._decoder.flush()
        if self._matcher is None:
            return rest, False
        text, stopped = self._matcher.feed(rest)
        return (text, True) if stopped else (text + self._matcher.flush(), False)
