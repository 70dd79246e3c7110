"""The skeleton of a story: its wording with every slot word blanked."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kdray.demo.text.slots import SLOTS

_WORDS = sorted(
    {word for slot in SLOTS.values() for word in slot.texts.values()}, key=len, reverse=True
)
_SLOT_WORDS = re.compile(r"\b(?:" + "|".join(map(re.escape, _WORDS)) + r")\b|\d+")


def skeleton(text: str) -> str:
    """``text`` with names, pronouns, animals, colours, places, numbers and so on blanked."""
    return _SLOT_WORDS.sub("_", text)


def count_skeletons(texts: Iterable[str]) -> int:
    """How many different skeletons some texts have."""
    return len({skeleton(text) for text in texts})
