"""The looser judgement of a story: whatever its wording, does it contradict its own facts?"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kdray.demo.text.document import Fact
from kdray.demo.text.words import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    GIRLS,
    GOODS,
    NAMES,
    OBJECTS,
    UNITS,
    WEATHERS,
)

_CATEGORIES: Mapping[str, tuple[tuple[str, ...], int]] = {
    "animal": (ANIMALS, 1), "adj": (ADJECTIVES, 1), "col": (COLOURS, 1), "obj": (OBJECTS, 1),
    "weather": (WEATHERS, 1), "unit": (UNITS, 1), "other": (GOODS, 1),
}  # fmt: skip
"""For each fact its words and how many of them one story may use."""
_FEMALE, _MALE = {"she", "her"}, {"he", "him", "his"}


def contradiction(known: Mapping[str, Fact], text: str) -> str | None:
    """The first fact that ``text`` contradicts, or None."""
    words = re.findall(r"[A-Za-z]+", text)
    lower = {word.lower() for word in words}
    return (
        _wrong_names(known, {word for word in words if word in NAMES}, lower)
        or _wrong_words(known, lower)
        or _wrong_numbers(text)
        or (None if str(known.get("place", "")) in text else f"not {known['place']}")
    )


def _wrong_names(known: Mapping[str, Fact], names: set[str], lower: set[str]) -> str | None:
    missing = [str(known[key]) for key in ("hero", "friend") if key in known]
    if any(name not in names for name in missing):
        return f"names {sorted(names)} lack one of {missing}"
    if len(names) != 2:
        return f"{len(names)} names: {sorted(names)}"
    allowed: set[str] = set()
    for name in names:
        allowed |= _FEMALE if name in GIRLS else _MALE
    wrong = lower & (_FEMALE | _MALE) - allowed
    return f"pronoun {sorted(wrong)} fits neither of {sorted(names)}" if wrong else None


def _wrong_words(known: Mapping[str, Fact], lower: set[str]) -> str | None:
    for key, (words, allowed) in _CATEGORIES.items():
        used = lower & set(words)
        if len(used) > allowed:
            return f"{key} changes: {sorted(used)}"
        if key in known and used and known[key] not in used:
            return f"{key} is {sorted(used)}, not {known[key]}"
    return None


def _wrong_numbers(text: str) -> str | None:
    numbers = list(dict.fromkeys(int(digits) for digits in re.findall(r"\d+", text)))
    if len(numbers) < 3:
        return None
    n, k, total = numbers[0], numbers[1], numbers[-1]
    if total in (n + k, n - k) and len(numbers) == 3:
        return None
    return f"numbers {numbers} do not add up"
