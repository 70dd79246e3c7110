"""Random requests that arrive, run and are given up at random: what soaks and equality checks use.

Everything is drawn from a seed, and arrivals count in steps, so a run can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kdray.core.request import Request, SamplingParams
from kdray.demo.text import held_out_prompts
from kdray.driver.driver import Driver
from kdray.engine import EngineFacts, make_request
from kdray.model.chat import encode_chat
from kdray.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request of the traffic.

    pause    steps between the arrival before and this one
    patience steps after which its client goes away; None: it stays
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    pause: int
    patience: int | None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a visit got: its tokens, all of them unless it left before."""

    token_ids: list[int]
    finish_reason: str | None


def demo_prompts(facts: EngineFacts, each: int = 12, seed: int = 3) -> list[list[int]]:
    """Chats of the demo model's four kinds, as tokens."""
    tokenizer = Tokenizer.from_folder(facts.target)
    return [
        encode_chat(tokenizer, document.prompt_messages)
        for kind in ("story", "problem", "function", "question")
        for document in held_out_prompts(kind, each, seed=seed)  # type: ignore[arg-type]
    ]


def draw_visits(
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    most_tokens: int = 96,
    busy: float = 0.7,
    leaving: float = 0.1,
) -> Iterator[Visit]:
    """Endless visits: `busy` of them come at once with the one before, `leaving` of them leave.

    Two in three are greedy or drawn; the others filter, penalise or bias, as clients do.
    """
    dice = random.Random(seed)
    while True:
        prompt = list(dice.choice(prompts))
        yield Visit(
            prompt=tuple(prompt[: dice.choice([len(prompt), dice.randint(1, len(prompt))])]),
            sampling=_sampling(dice, most_tokens),
            pause=0 if dice.random() < busy else dice.randint(1, 12),
            patience=dice.randint(0, 20) if dice.random() < leaving else None,
        )


def _sampling(dice: random.Random, most_tokens: int) -> SamplingParams:
    drawn = SamplingParams(
        max_tokens=dice.randint(1, most_tokens),
        temperature=dice.choice([0.0, 0.3, 0.8, 1.0, 1.5]),
        seed=dice.getrandbits(62),
        ignore_eos=dice.random() < 0.2,
    )
    kind = dice.randrange(9)
    if kind == 0:
        return replace(drawn, top_k=dice.randint(1, 50), top_p=dice.uniform(0.5, 1.0))
    if kind == 1:
        return replace(drawn, min_p=dice.uniform(0.0, 0.2))
    if kind == 2:
        return replace(drawn, repetition_penalty=1.2, presence_penalty=0.3)
    if kind == 3:
        return replace(drawn, logit_bias=((dice.randrange(256), 3.0),))
    return drawn


def run_visits(driver: Driver, facts: EngineFacts, visits: Sequence[Visit]) -> list[Reply]:
    """All visits through a driver, arriving and leaving as drawn; audits the pages every step."""
    requests: list[Request] = []
    leaving: dict[int, list[str]] = {}
    coming, step, next_arrival = 0, 0, 0
    running = True
    while running or coming < len(visits):
        while coming < len(visits) and step >= next_arrival:
            visit = visits[coming]
            request = make_request(f"v{coming}", visit.prompt, visit.sampling, facts)
            driver.submit(request)
            requests.append(request)
            if visit.patience is not None:
                leaving.setdefault(step + visit.patience, []).append(request.request_id)
            coming += 1
            if coming < len(visits):
                next_arrival = step + visits[coming].pause
        running = driver.step() is not None
        for request_id in leaving.pop(step, ()):
            driver.abort(request_id)
        driver.scheduler.pages.check()
        step += 1
    return [Reply(r.tokens[len(r.prompt) :], r.finish_reason) for r in requests]
