"""Corrupted answers fail: a swapped name, colour, count, sum, or a wrong function."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from kdray.demo.text import (
    Document,
    Exchange,
    check_function,
    check_problem,
    check_question,
    check_recall,
    check_story,
    held_out_prompts,
)
from kdray.demo.text.words import ANIMALS, COLOURS, NAMES, OBJECTS, PLACES, WEATHERS


def prompts(kind: str, count: int = 60) -> list[Document]:
    return held_out_prompts(kind, count, seed=11)  # type: ignore[arg-type]


def swap_last(text: str, words: tuple[str, ...], rng: random.Random) -> str | None:
    """The last of ``words`` in the text replaced by another, if the text holds one twice."""
    found = list(re.finditer(r"\b(?:" + "|".join(words) + r")\b", text))
    again = [m for m in found if sum(o.group() == m.group() for o in found) > 1]
    if not again:
        return None
    match = again[-1]
    other = rng.choice([word for word in words if word not in text])
    return text[: match.start()] + other + text[match.end() :]


@pytest.mark.parametrize("words", [NAMES, ANIMALS, COLOURS, OBJECTS, WEATHERS])
def test_a_story_with_a_swapped_fact_fails(words: tuple[str, ...]) -> None:
    rng = random.Random(0)
    corrupted = 0
    for document in prompts("story"):
        text = swap_last(document.last.answer, words, rng)
        if text is None:
            continue
        corrupted += 1
        assert not check_story(document.last.facts, text).strict, text
    assert corrupted > 10


@pytest.mark.parametrize("words", [NAMES, COLOURS, WEATHERS])
def test_a_swapped_fact_is_a_contradiction_too(words: tuple[str, ...]) -> None:
    rng = random.Random(0)
    for document in prompts("story"):
        text = swap_last(document.last.answer, words, rng)
        if text is not None:
            assert not check_story(document.last.facts, text).facts, text


def test_a_story_about_other_facts_than_the_prompt_fails() -> None:
    documents = prompts("story")
    for document, other in pairwise(documents):
        named = {key: value for key, value in document.last.facts.items() if "." not in key}
        told = {key: other.last.facts.get(f"story.{key}") for key in named}
        if any(told[key] is not None and told[key] != named[key] for key in named):
            assert not check_story(document.last.facts, other.last.answer).strict


def test_a_story_with_a_wrong_count_fails() -> None:
    seen = 0
    for document in prompts("story", 200):
        if document.last.facts["story.rule"] == "none":
            continue
        seen += 1
        total = str(document.last.facts["story.total"])
        wrong = re.sub(rf"\b{total}\b", str(int(total) + 1), document.last.answer)
        verdict = check_story(document.last.facts, wrong)
        assert not verdict.strict and not verdict.facts
    assert seen > 10


def test_a_wrong_pronoun_and_a_broken_off_story_fail() -> None:
    for document in prompts("story"):
        text = document.last.answer
        assert not check_story(document.last.facts, text[: len(text) // 2]).strict
        hero = str(document.last.facts["story.hero"])
        pronoun = re.search(r"\b(She|He|she|he)\b", text)
        if pronoun and hero in text:
            other = {"She": "He", "He": "She", "she": "he", "he": "she"}[pronoun.group()]
            wrong = text[: pronoun.start()] + other + text[pronoun.end() :]
            assert not check_story(document.last.facts, wrong).strict


def test_hero_and_friend_must_differ() -> None:
    for document in prompts("story"):
        facts = document.last.facts
        same = document.last.answer.replace(str(facts["story.friend"]), str(facts["story.hero"]))
        assert not check_story({}, same).strict


def test_another_wording_keeps_the_facts_but_is_not_strict() -> None:
    for document in prompts("story", 20):
        verdict = check_story(document.last.facts, document.last.answer + " The end.")
        assert not verdict.strict and verdict.facts, verdict.reason


def test_problems_with_wrong_sums_fail() -> None:
    for document in prompts("problem"):
        facts, answer = document.last.facts, document.last.answer
        result = str(facts["result"])
        assert not check_problem(facts, answer.replace(result, str(int(result) + 1))).facts
        assert not check_problem(facts, "I do not know.").facts
    sums = Exchange("problem", "", "", {"problem": "plus", "a": 47, "b": 85, "result": 132})
    assert check_problem(sums.facts, "47 + 85 = 132, so it is 132").facts
    assert not check_problem(sums.facts, "47 + 85 = 122, so it is 132").facts


def test_functions_are_judged_by_running_them() -> None:
    facts = {"operation": "above", "name": "keep_above", "list": "values", "k": 4}
    right = "def keep_above(values):\n    return [v for v in values if v > 4]"
    assert check_function(facts, right).facts and not check_function(facts, right).strict
    wrong = {
        "constant": right.replace("4", "5"),
        "name": right.replace("keep_above", "keep"),
        "syntax": right.replace("]", ""),
        "import": "import os\n" + right,
        "loop": "def keep_above(values):\n    while True:\n        pass",
        "unsafe": "def keep_above(values):\n    return values.__class__",
        "builtin": "def keep_above(values):\n    return open('x')",
    }
    for fault, source in wrong.items():
        assert not check_function(facts, source).facts, fault


def test_corrupted_functions_fail() -> None:
    for document in prompts("function"):
        answer = document.last.answer
        head, body = answer.rsplit("return", 1)
        broken = f"{head}retrun{body}"
        assert not check_function(document.last.facts, broken).facts


def test_questions_and_recall_want_the_right_answer() -> None:
    for document in prompts("question"):
        assert not check_question(document.last.facts, "A draft tree is a kind of oak.").facts
    for document in prompts("recall"):
        facts = document.last.facts
        assert not check_recall(facts, "I do not remember.").facts
    place = next(d for d in prompts("recall", 200) if d.last.facts["question"] == "place")
    other = next(p for p in PLACES if p != place.last.facts["place"])
    assert not check_recall(place.last.facts, f"It began {other}.").facts
    assert check_recall(place.last.facts, f"I think {place.last.facts['place']}.").facts
