"""Request bodies for load tests: the demo's held-out prompts, a file's, or made-up ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from kdray.errors import KdrayError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Made-up prompts are token ids that every vocabulary has, and none of the special ones.
SYNTHETIC_IDS = range(300, 900)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a load test: where it goes and what it says."""

    path: str
    body: dict[str, Any]


class Prompts:
    """An endless supply, in a fixed order; every row of a test goes on where the last one ended."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._asks = cycle(asks)

    def take(self, count: int) -> list[Ask]:
        return list(islice(self._asks, count))


def demo_prompts(count: int, seed: int, options: dict[str, Any]) -> Prompts:
    """Held-out prompts of the demo's four kinds, mixed."""
    from kdray.demo.text import KINDS, held_out_prompts

    documents = [d for kind in KINDS for d in held_out_prompts(kind, -(-count // 4), seed=seed)]
    random.Random(seed).shuffle(documents)
    return Prompts([Ask(CHAT, options | {"messages": d.prompt_messages}) for d in documents])


def file_prompts(path: Path, options: dict[str, Any]) -> Prompts:
    """Lines as jobs/generate.py reads them; those of OpenAI's batch files keep their own bodies."""
    from batch_lines import read_lines

    asks = []
    for line in read_lines(path, {"seed": 0}, raw=False):
        own = dict(line.body)
        if line.custom_id is None:
            own.pop("seed")
        own.pop("model", None)
        asks.append(Ask(line.path, options | own))
    return Prompts(asks)


def synthetic_prompts(lengths: str, count: int, seed: int, options: dict[str, Any]) -> Prompts:
    """IN:OUT: prompts of IN random tokens, answers of OUT that run on past every end."""
    try:
        tokens_in, tokens_out = (int(part) for part in lengths.split(":"))
    except ValueError:
        raise KdrayError(f"--synthetic wants IN:OUT in tokens, got {lengths!r}") from None
    if tokens_in < 1 or tokens_out < 1:
        raise KdrayError(f"--synthetic wants at least one token each, got {lengths!r}")
    dice = random.Random(seed)
    fixed = options | {"max_tokens": tokens_out, "ignore_eos": True}
    return Prompts(
        [Ask(TEXT, fixed | {"prompt": dice.choices(SYNTHETIC_IDS, k=tokens_in)})
         for _ in range(count)]
    )  # fmt: skip
