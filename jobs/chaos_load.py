"""The load of a chaos run: its requests, and what their readers get."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from batch_lines import TEXT, Line
from traffic import Visit, demo_prompts, draw_visits

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.engine import resolve

if TYPE_CHECKING:  # it imports Ray
    from offline import Offline

STOPS = (".", " the", "\n\n")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a request's reader got; tokens as far as they count."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    completion_tokens: int | None
    error: str | None


@dataclass(slots=True)
class Load:
    """The requests as they run; `shown` is when any reader last got text."""

    replies: dict[int, Reply] = field(default_factory=dict)
    shown: float = 0.0
    longest_silence_s: float = 0.0

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self.shown:
            self.longest_silence_s = max(self.longest_silence_s, now - self.shown)
        self.shown = now


def request_lines(config: EngineConfig, *, seed: int, most_tokens: int) -> Iterator[Line]:
    """Endless completions of the demo's prompts, drawn in all ways that clients draw."""
    facts = resolve(config)
    visits = draw_visits(demo_prompts(facts), seed=seed, most_tokens=most_tokens)
    for number, visit in enumerate(visits, start=1):
        stop = [STOPS[number // 8 % len(STOPS)]] if number % 8 == 0 else []
        body = _body(visit, stop, facts.max_model_len)
        yield Line(number=number, source={}, path=TEXT, body=body)


def _body(visit: Visit, stop: Sequence[str], longest: int) -> dict[str, Any]:
    sampling: SamplingParams = visit.sampling
    return {
        "prompt": list(visit.prompt),
        "max_tokens": min(sampling.max_tokens, longest - len(visit.prompt)),
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(token): value for token, value in sampling.logit_bias},
        "ignore_eos": True,
        "stop": list(stop),
    }


async def answer_all(endpoint: Offline, coming: Iterator[Line], load: Load) -> None:
    for line in coming:
        answer = await endpoint.stream(line, load.show)
        choice = answer.body.get("choices", [{}])[0]
        used = (answer.body.get("usage") or {}).get("completion_tokens")
        load.replies[line.number] = Reply(
            text=answer.text,
            token_ids=tuple(answer.token_ids[:used]),
            finish_reason=choice.get("finish_reason"),
            completion_tokens=used,
            error=answer.error,
        )
