"""The generator keeps its promises: seeds, shares, held-out tuples, text that passes its checks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kdray.demo.text import KINDS, Document, Kind, check_answer, held_out_prompts, sample_document
from kdray.demo.text.arithmetic import difference_is_held_out, sum_is_held_out
from kdray.demo.text.draw import Draw, is_held_out
from kdray.demo.text.skeleton import count_skeletons, skeleton
from kdray.demo.text.stories import PAIR_SHARE


def documents(count: int, seed: int = 0) -> list[Document]:
    rng = random.Random(seed)
    return [sample_document(rng) for _ in range(count)]


def test_a_seed_gives_the_same_documents() -> None:
    assert documents(50, seed=3) == documents(50, seed=3)
    assert documents(50, seed=3) != documents(50, seed=4)


def test_shares_of_kinds_and_turns() -> None:
    sample = documents(4000)
    kinds = Counter(document.kind for document in sample)
    expected = {"story": 0.60, "problem": 0.15, "function": 0.15, "question": 0.10}
    for kind, share in expected.items():
        assert abs(kinds[kind] / len(sample) - share) < 0.03
    further = sum(len(document.exchanges) > 1 for document in sample) / len(sample)
    assert abs(further - 0.30) < 0.03
    in_between = [d for d in sample if [e.kind for e in d.exchanges][2:] == ["recall"]]
    assert any(d.exchanges[1].kind != "recall" for d in in_between)


def test_corpus_passes_the_strict_checkers() -> None:
    for document in documents(1500, seed=1):
        for exchange in document.exchanges:
            verdict = check_answer(exchange, exchange.answer)
            assert verdict.strict and verdict.facts, (verdict.reason, exchange.answer)


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_prompts_are_of_their_kind_and_pass(kind: Kind) -> None:
    prompts = held_out_prompts(kind, 40, seed=7)
    assert prompts == held_out_prompts(kind, 40, seed=7)
    for document in prompts:
        assert document.last.kind == kind
        assert document.prompt_turns[-1].role == "user"
        assert check_answer(document.last, document.last.answer).strict


def story_tuples(document: Document) -> list[tuple[bool, bool]]:
    """For each story: is its (hero, animal) held out, is its (object, colour, place)."""
    facts = [e.facts for e in document.exchanges if e.kind == "story"]
    return [
        (
            is_held_out(PAIR_SHARE, f["story.hero"], f["story.animal"]),
            is_held_out(PAIR_SHARE, f["story.obj"], f["story.col"], f["story.place"]),
        )
        for f in facts
    ]


def test_held_out_tuples_never_stand_in_training_text() -> None:
    for document in documents(1500, seed=2):
        assert not any(a or b for a, b in story_tuples(document))
        for exchange in document.exchanges:
            assert exchange.kind != "problem" or not holds_held_out_sum(dict(exchange.facts))
    for document in held_out_prompts("story", 100, seed=2):
        assert all(a and b for a, b in story_tuples(document))
    for document in held_out_prompts("problem", 100, seed=2):
        facts = dict(document.last.facts)
        assert facts["problem"] == "groups" or holds_held_out_sum(facts)


def holds_held_out_sum(facts: dict[str, str | int]) -> bool:
    a, b = int(facts["a"]), int(facts["b"])
    if facts["problem"] in ("loss", "minus"):
        return difference_is_held_out(a, b)
    return facts["problem"] != "groups" and sum_is_held_out(a, b)


def test_half_of_the_story_prompts_name_hero_and_friend() -> None:
    facts = [d.facts for d in documents(3000, seed=5) if d.kind == "story"]
    both = sum("hero" in f and "friend" in f for f in facts) / len(facts)
    assert 0.42 < both < 0.58


def test_sums_reach_past_a_hundred() -> None:
    results = [
        int(e.facts["result"])
        for d in documents(3000, seed=6)
        for e in d.exchanges
        if e.kind == "problem"
    ]
    assert max(results) > 180 and max(results) <= 198
    assert sum(result > 100 for result in results) > 100


def test_facts_are_uniform_and_wordings_are_skewed() -> None:
    draw = Draw(random.Random(0))
    options = ("a", "b", "c", "d")
    facts = Counter(draw.fact(options) for _ in range(8000))
    wordings = Counter(draw.wording(options, "key", "fox") for _ in range(8000))
    assert max(facts.values()) / 8000 < 0.28
    assert 0.65 < max(wordings.values()) / 8000 < 0.75


def test_charged_information_is_the_entropy_of_the_choice() -> None:
    draw = Draw(random.Random(0))
    for _ in range(20_000):
        draw.wording(("a", "b"), "key")
    assert abs(draw.nats / 20_000 - 0.5004) < 0.01  # entropy of (0.8, 0.2)


def test_skeletons_blank_slots_and_keep_wording() -> None:
    first = skeleton("There he met a small fox. He had 12 nuts.")
    assert first == skeleton("There she met an old owl. She had 7 plums.")
    assert first != skeleton("Then a small fox came along. He had 12 nuts.")
    stories = [d.last.answer for d in held_out_prompts("story", 60, seed=1)]
    assert count_skeletons(stories) > 50
