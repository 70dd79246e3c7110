"""Questions about a story that was told earlier in the same chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kdray.demo.text.document import Exchange, Fact, Verdict
from kdray.demo.text.draw import Draw
from kdray.demo.text.slots import texts_of


@dataclass(frozen=True)
class RecallQuestion:
    """Wordings of one question, its answer, and the slots that a right answer must show."""

    wordings: tuple[str, ...]
    answer: str
    needs: tuple[str, ...]
    rule: str | None = None


QUESTIONS: Mapping[str, RecallQuestion] = {
    "hero": RecallQuestion(
        ("Who is the story about?", "What is the name of the child in the story?"),
        "The story is about {hero}.",
        ("hero",),
    ),
    "friend": RecallQuestion(
        ("Who was there besides {hero}?", "Which friend is in the story with {hero}?"),
        "The friend was {friend}.",
        ("friend",),
    ),
    "colour": RecallQuestion(
        ("What colour was the {obj}?", "Which colour did the {obj} have?"),
        "The {obj} was {col}.",
        ("obj", "col"),
    ),
    "animal": RecallQuestion(
        ("Which animal did {hero} meet?", "What animal was in the story?"),
        "{hero} met {a_adj} {animal}.",
        ("adj", "animal"),
    ),
    "thing": RecallQuestion(
        ("What was {col} in the story?", "Which thing was {col}?"),
        "It was the {obj} that was {col}.",
        ("obj",),
    ),
    "place": RecallQuestion(
        ("Where did the story begin?", "Where was {hero} at first?"),
        "It began {place}.",
        ("place",),
    ),
    "weather": RecallQuestion(
        ("What was the weather like?", "How was the weather that day?"),
        "It was {weather}.",
        ("weather",),
    ),
    "plus": RecallQuestion(
        ("How many {unit} were there in the end?", "How many {unit} did {hero} have at last?"),
        "There were {total} {unit} in the end.",
        ("total", "unit"),
        rule="plus",
    ),
    "minus": RecallQuestion(
        ("How many {unit} were left?", "How many {unit} did {hero} keep?"),
        "There were {total} {unit} left.",
        ("total", "unit"),
        rule="minus",
    ),
}


def make_recall(draw: Draw, story: Exchange) -> Exchange:
    """A question about ``story`` (made by ``make_story``) with its answer."""
    facts = {
        name.removeprefix("story."): value
        for name, value in story.facts.items()
        if name.startswith("story.")
    }
    fitting = [
        name for name, question in QUESTIONS.items() if question.rule in (None, facts["rule"])
    ]
    name = draw.fact(fitting)
    question = QUESTIONS[name]
    shown = texts_of(facts)
    prompt = draw.fact(question.wordings).format_map(shown)
    return Exchange(
        "recall", prompt, question.answer.format_map(shown), {**facts, "question": name}
    )


def check_recall(facts: Mapping[str, Fact], answer: str) -> Verdict:
    """Strict: the one answer of the grammar. Facts: the asked-for values stand in the answer."""
    question = QUESTIONS[str(facts["question"])]
    shown = texts_of(facts)
    expected = question.answer.format_map(shown)
    if answer.strip() == expected:
        return Verdict(True, True)
    padded = f" {answer.strip().rstrip('.')} "
    right = all(f" {shown[name]} " in padded for name in question.needs)
    return Verdict(False, right, f"expected {expected!r}")
