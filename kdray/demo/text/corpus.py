"""Documents of the corpus, held-out prompts, and the one door to the checkers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from kdray.demo.text.document import Document, Exchange, Fact, Kind, Verdict
from kdray.demo.text.draw import Draw
from kdray.demo.text.functions import check_function, make_function
from kdray.demo.text.problems import check_problem, make_problem
from kdray.demo.text.questions import check_question, make_question
from kdray.demo.text.recall import check_recall, make_recall
from kdray.demo.text.stories import make_story
from kdray.demo.text.story_check import check_story

SHARES: tuple[tuple[float, Kind], ...] = (
    (0.60, "story"),
    (0.75, "problem"),
    (0.90, "function"),
    (1.00, "question"),
)
"""Cumulative shares of the kinds that open a document."""
FURTHER_TURNS = 0.30
SYSTEM_SHARE = 0.06
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are the demo model of kdray.",
    "You are a friendly assistant. Answer in short sentences.",
    "Be helpful and polite.",
)
_MAKERS: Mapping[str, Callable[[Draw, bool], Exchange]] = {
    "story": make_story,
    "problem": make_problem,
    "function": make_function,
    "question": make_question,
}
_CHECKERS: Mapping[str, Callable[[Mapping[str, Fact], str], Verdict]] = {
    "story": check_story,
    "problem": check_problem,
    "function": check_function,
    "question": check_question,
    "recall": check_recall,
}


def sample_document(rng: random.Random) -> Document:
    """A document of the training text: one exchange, or in 30 % of cases two or three."""
    draw = Draw(rng)
    first = _exchange(draw)
    exchanges: tuple[Exchange, ...] = (first,)
    if draw.chance(FURTHER_TURNS):
        exchanges += _story_turns(draw, first) if first.kind == "story" else (_exchange(draw),)
    system = draw.fact(SYSTEM_MESSAGES) if draw.chance(SYSTEM_SHARE) else None
    return Document(exchanges, system)


def held_out_prompts(kind: Kind, n: int, seed: int) -> list[Document]:
    """``n`` documents whose last exchange is of ``kind`` and held out of the training text.

    A ``recall`` document tells a held-out story, in half of the cases takes a turn in between, and
    then asks for one of the story's facts. Ask a model for an answer to ``prompt_turns`` and judge
    it with ``check_answer(document.last, text)``.
    """
    rng = random.Random(f"held-out {kind} {seed}")
    return [_held_out(Draw(rng), kind) for _ in range(n)]


def check_answer(exchange: Exchange, answer: str) -> Verdict:
    """Judge any ``answer`` to the exchange's prompt."""
    return _CHECKERS[exchange.kind](exchange.facts, answer)


def _held_out(draw: Draw, kind: Kind) -> Document:
    if kind != "recall":
        return Document((_MAKERS[kind](draw, True),))
    story = make_story(draw, held_out=True)
    between = (_exchange(draw, stories=False),) if draw.chance(0.5) else ()
    return Document((story, *between, make_recall(draw, story)))


def _exchange(draw: Draw, stories: bool = True) -> Exchange:
    story_share = SHARES[0][0]
    point = draw.rng.random()
    if not stories:
        point = story_share + (1 - story_share) * max(point, 1e-9)
    kind = next(kind for limit, kind in SHARES if point <= limit)
    return _MAKERS[kind](draw, False)


def _story_turns(draw: Draw, story: Exchange) -> tuple[Exchange, ...]:
    """What follows a story: questions about it, often after another turn, or something else."""
    point = draw.rng.random()
    if point < 0.35:
        return (make_recall(draw, story),)
    if point < 0.55:
        return (make_recall(draw, story), make_recall(draw, story))
    if point < 0.85:
        return (_exchange(draw, stories=False), make_recall(draw, story))
    return (_exchange(draw),)
