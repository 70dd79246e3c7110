"""Judge a story by the grammar: is it derivable with one binding of its slots?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from kdray.demo.text.document import Fact, Verdict
from kdray.demo.text.plots import Plot
from kdray.demo.text.plots_of_people import PLOTS
from kdray.demo.text.slots import NUMBERS, SLOTS
from kdray.demo.text.story_facts import contradiction

Binding = dict[str, Fact]


@dataclass
class _Progress:
    """How far a failed derivation came; only for the reason in the verdict."""

    reached: int = 0


def check_story(facts: Mapping[str, Fact], answer: str) -> Verdict:
    """Judge ``answer`` against the facts of its prompt (keys without the ``story.`` prefix)."""
    known = {name: value for name, value in facts.items() if "." not in name}
    text = answer.strip()
    plots = [PLOTS[str(known.pop("plot"))]] if "plot" in known else list(PLOTS.values())
    progress = _Progress()
    for plot in plots:
        for binding in _derive(plot, 0, text, 0, dict(known), progress):
            if _obeys(plot, binding):
                return Verdict(True, True)
    against = contradiction(known, text)
    reason = f"no derivation after {text[: progress.reached][-40:]!r}"
    return Verdict(False, against is None, against or reason)


def _obeys(plot: Plot, binding: Binding) -> bool:
    if binding["hero"] == binding["friend"]:
        return False
    n, k, total = (int(binding.get(name, 0)) for name in ("n", "k", "total"))
    return {"none": True, "plus": n + k == total, "minus": n - k == total}[plot.rule]


def _derive(
    plot: Plot, index: int, text: str, start: int, binding: Binding, progress: _Progress
) -> Iterator[Binding]:
    """Every binding under which steps ``index``.. of the plot write ``text[start:]``."""
    progress.reached = max(progress.reached, start)
    if index == len(plot.steps):
        if start == len(text):
            yield binding
        return
    if index > 0:
        if not text.startswith(" ", start):
            return
        start += 1
    for wording in plot.steps[index]:
        for end, bound in _match(pieces_of(wording), 0, text, start, binding):
            yield from _derive(plot, index + 1, text, end, bound, progress)


@lru_cache(maxsize=4096)
def pieces_of(wording: str) -> tuple[tuple[bool, str], ...]:
    """A wording as (is a slot, slot name or literal text) pieces."""
    parts = re.split(r"{(\w+)}", wording)
    return tuple((i % 2 == 1, part) for i, part in enumerate(parts) if part)


def _match(
    pieces: tuple[tuple[bool, str], ...], index: int, text: str, start: int, binding: Binding
) -> Iterator[tuple[int, Binding]]:
    """Every (end, binding) with which the pieces from ``index`` on match at ``start``."""
    if index == len(pieces):
        yield start, binding
        return
    is_slot, content = pieces[index]
    if not is_slot:
        if text.startswith(content, start):
            yield from _match(pieces, index + 1, text, start + len(content), binding)
        return
    for end, bound in _match_slot(content, text, start, binding):
        yield from _match(pieces, index + 1, text, end, bound)


def _match_slot(
    name: str, text: str, start: int, binding: Binding
) -> Iterator[tuple[int, Binding]]:
    if name in NUMBERS:
        found = re.compile(r"\d+").match(text, start)
        if found and binding.get(name, int(found.group())) == int(found.group()):
            yield found.end(), {**binding, name: int(found.group())}
        return
    slot = SLOTS[name]
    if slot.base is not None and slot.base in binding:
        shown = slot.texts[str(binding[slot.base])]
        if text.startswith(shown, start):
            yield start + len(shown), binding
        return
    for value, shown in slot.texts.items():
        if text.startswith(shown, start):
            bound = binding if slot.base is None else {**binding, slot.base: value}
            yield start + len(shown), bound
