"""The slots of story sentences: which fact each one shows, and as which text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kdray.demo.text.document import Fact
from kdray.demo.text.words import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    GIRLS,
    GOODS,
    LOOKS,
    NAMES,
    OBJECTS,
    PLACES,
    SPOTS,
    THINGS,
    UNITS,
    WEATHERS,
    with_article,
)

NUMBERS = frozenset({"n", "k", "total"})
"""Slots that hold an integer and are written in digits."""


@dataclass(frozen=True)
class Slot:
    """A slot shows fact ``base`` as ``texts[value]``; with ``base`` None it is free each time."""

    base: str | None
    texts: Mapping[str, str]


def _same(base: str | None, words: tuple[str, ...]) -> Slot:
    return Slot(base, {word: word for word in words})


def _article(base: str, words: tuple[str, ...], capital: bool = False) -> Slot:
    texts = {word: with_article(word) for word in words}
    return Slot(base, {w: t[0].upper() + t[1:] if capital else t for w, t in texts.items()})


def _pronoun(base: str, female: str, male: str) -> Slot:
    return Slot(base, {name: female if name in GIRLS else male for name in NAMES})


SLOTS: Mapping[str, Slot] = {
    "hero": _same("hero", NAMES),
    "he": _pronoun("hero", "she", "he"),
    "He": _pronoun("hero", "She", "He"),
    "his": _pronoun("hero", "her", "his"),
    "him": _pronoun("hero", "her", "him"),
    "friend": _same("friend", NAMES),
    "f_he": _pronoun("friend", "she", "he"),
    "F_he": _pronoun("friend", "She", "He"),
    "f_his": _pronoun("friend", "her", "his"),
    "f_him": _pronoun("friend", "her", "him"),
    "animal": _same("animal", ANIMALS),
    "adj": _same("adj", ADJECTIVES),
    "a_adj": _article("adj", ADJECTIVES),
    "A_adj": _article("adj", ADJECTIVES, capital=True),
    "obj": _same("obj", OBJECTS),
    "other": _same("other", GOODS),
    "a_other": _article("other", GOODS),
    "col": _same("col", COLOURS),
    "a_col": _article("col", COLOURS),
    "A_col": _article("col", COLOURS, capital=True),
    "place": _same("place", PLACES),
    "spot": _same("spot", SPOTS),
    "weather": _same("weather", WEATHERS),
    "unit": _same("unit", UNITS),
    "thing": _same(None, THINGS),
    "look": _same(None, LOOKS),
}


def texts_of(facts: Mapping[str, Fact]) -> dict[str, str]:
    """The text of every bound slot for one set of facts."""
    shown = {
        name: slot.texts[str(facts[slot.base])]
        for name, slot in SLOTS.items()
        if slot.base is not None and slot.base in facts
    }
    shown.update({name: str(facts[name]) for name in NUMBERS if name in facts})
    return shown
