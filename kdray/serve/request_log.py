"""One line a request, as JSON: what it was, what became of it, how long it took."""

from __future__ import annotations

import json
import logging
from typing import Any

from kdray.serve.generation import Choice, Generation, Progress
from kdray.serve.text import ChoiceStep

log = logging.getLogger("kdray.requests")


class RequestLog:
    """Observes generations; says nothing of texts, prompts or keys."""

    def started(self, generation: Generation) -> None:
        pass

    def began(self, choice: Choice) -> None:
        pass

    def stepped(self, step: ChoiceStep) -> None:
        pass

    def ended(self, generation: Generation) -> None:
        log.info("%s", json.dumps(line_of(generation)))


def line_of(generation: Generation) -> dict[str, Any]:
    """Times in milliseconds; null where there was nothing to time."""
    progress = generation.progress
    firsts = [p.first_at for p in progress if p.first_at is not None]
    lengths = [length for p in progress for length in p.accept_lengths]
    return {
        "id": generation.request_id,
        "outputs": len(progress),
        "prompt_tokens": sum(len(choice.prompt) for choice in generation.choices),
        "completion_tokens": sum(p.num_tokens for p in progress),
        "finish_reasons": sorted({p.outcome or "error" for p in progress}),
        "ttft_ms": _ms(min(firsts) - generation.started_at) if firsts else None,
        "tpot_ms": _ms(_seconds_a_token(progress)),
        "total_ms": _ms(generation.seconds),
        "accept_length_mean": round(sum(lengths) / len(lengths), 3) if lengths else None,
    }


def _seconds_a_token(progress: tuple[Progress, ...]) -> float | None:
    """Behind the first step, over all outputs."""
    seconds, tokens = 0.0, 0
    for choice in progress:
        if choice.first_at is not None and choice.last_at is not None:
            seconds += choice.last_at - choice.first_at
            tokens += choice.num_tokens - choice.num_first
    return seconds / tokens if tokens else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
