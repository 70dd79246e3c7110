"""Stories: facts drawn uniformly, a plot, and wordings skewed by the facts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from kdray.demo.text.arithmetic import draw_difference, draw_sum
from kdray.demo.text.document import Exchange, Fact
from kdray.demo.text.draw import Draw, is_held_out
from kdray.demo.text.plots import Plot
from kdray.demo.text.plots_of_people import PLOTS
from kdray.demo.text.slots import NUMBERS, SLOTS, texts_of
from kdray.demo.text.words import (
    ADJECTIVES,
    ANIMALS,
    BOYS,
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
)

PAIR_SHARE = 0.05
"""Held-out share of (hero, animal) pairs, and of (object, colour, place) triples."""

PROMPTS: tuple[str, ...] = (
    "Write a story about {hero}, {friend} and {a_adj} {animal}. There should be {a_col} {obj}.",
    "Tell me a story {place} with {hero}, {friend}, {a_adj} {animal} and {a_col} {obj}.",
    "Please write about {hero} and {friend} on a {weather} day {place}.",
    "I would like a story in which {hero} and {friend} see {a_col} {obj} and {a_adj} {animal}.",
    "Write a short story with {hero} and {friend}.",
    "Tell me a story about {hero}, {friend} and {a_adj} {animal} {place}.",
    "Write a story about {hero} and {a_adj} {animal}.",
    "Can you write a story about {hero} {place} on a {weather} day?",
    "Write a story about {a_adj} {animal}, {a_col} {obj} and a child called {hero}.",
    "Tell me a story about {a_col} {obj} {place}.",
    "Write a story about {a_adj} {animal}.",
    "Please tell me a story.",
)
"""Half of them name both the hero and the friend."""
THEMES: tuple[str, ...] = (" It should be about {theme}.", " Let it be about {theme}.")
SKEW_KEYS = (("adj", "col"), ("animal", "weather"), ("col", "weather"), ("adj", "weather"))
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "hero": NAMES, "friend": GIRLS, "animal": ANIMALS, "adj": ADJECTIVES, "obj": OBJECTS,
    "other": GOODS, "col": COLOURS, "place": PLACES, "spot": SPOTS, "weather": WEATHERS,
    "unit": UNITS,
}  # fmt: skip
PLOT_NAMES = tuple(PLOTS)


@lru_cache(maxsize=4096)
def bases_in(template: str) -> frozenset[str]:
    """The facts whose slots stand in a template."""
    names = re.findall(r"{(\w+)}", template)
    bases = {name if name in NUMBERS else SLOTS[name].base for name in names if name != "theme"}
    return frozenset(base for base in bases if base is not None)


def make_story(draw: Draw, held_out: bool = False) -> Exchange:
    """One story with its prompt; ``held_out`` takes both slot tuples from the held-out share."""
    start = draw.nats
    facts = _draw_facts(draw, held_out)
    prompt_form = draw.fact(PROMPTS)
    facts["friend"] = _draw_friend(draw, str(facts["hero"]), "{friend}" in prompt_form)
    plot_name = draw.wording(PLOT_NAMES, "plot", facts["adj"], facts["animal"])
    plot = PLOTS[plot_name]
    facts.update(_draw_numbers(draw, plot, held_out))
    shown = texts_of(facts)
    theme_form = draw.fact(THEMES).replace("{theme}", plot.theme) if draw.chance(0.3) else ""
    if theme_form:
        draw.nats = start
    answer, used = _tell(draw, plot_name, plot, facts, shown)
    revealed = bases_in(prompt_form) | bases_in(theme_form)
    _charge_facts(draw, used - revealed)
    known = {name: facts[name] for name in sorted(revealed)}
    known.update({"plot": plot_name} if theme_form else {})
    prompt = (prompt_form + theme_form).format_map(shown)
    told: dict[str, Fact] = {f"story.{name}": facts[name] for name in sorted(used)}
    told["story.rule"] = plot.rule
    return Exchange("story", prompt, answer, {**known, **told}, draw.nats - start)


def _draw_facts(draw: Draw, held_out: bool) -> dict[str, Fact]:
    while True:
        pair = draw.fact(NAMES), draw.fact(ANIMALS)
        if is_held_out(PAIR_SHARE, *pair) == held_out:
            break
    while True:
        triple = draw.fact(OBJECTS), draw.fact(COLOURS), draw.fact(PLACES)
        if is_held_out(PAIR_SHARE, *triple) == held_out:
            break
    return {
        "hero": pair[0], "animal": pair[1], "obj": triple[0], "col": triple[1], "place": triple[2],
        "adj": draw.fact(ADJECTIVES), "weather": draw.fact(WEATHERS), "unit": draw.fact(UNITS),
        "other": draw.fact(GOODS), "spot": draw.fact(SPOTS),
    }  # fmt: skip


def _draw_friend(draw: Draw, hero: str, named: bool) -> str:
    """A friend that the prompt names is anybody else; one that it does not name is a girl for a boy
    and a boy for a girl.

    "Anybody but the hero" among forty equal names is a rule too faint to be learnt: greedy text
    would call both by the one favourite name.
    """
    options = tuple(name for name in NAMES if name != hero)
    if not named:
        options = BOYS if hero in GIRLS else GIRLS
    return draw.fact(options)


def _draw_numbers(draw: Draw, plot: Plot, held_out: bool) -> dict[str, Fact]:
    if plot.rule == "plus":
        n, k = draw_sum(draw, held_out)
        return {"n": n, "k": k, "total": n + k}
    if plot.rule == "minus":
        n, k = draw_difference(draw, held_out, largest=99)
        return {"n": n, "k": k, "total": n - k}
    return {}


def _tell(
    draw: Draw, plot_name: str, plot: Plot, facts: Mapping[str, Fact], shown: dict[str, str]
) -> tuple[str, set[str]]:
    """The text of a story, and the facts that it shows."""
    sentences: list[str] = []
    used: set[str] = set()
    for index, step in enumerate(plot.steps):
        first, second = SKEW_KEYS[index % len(SKEW_KEYS)]
        key = (plot_name, index, facts[first], facts[second])
        wording = draw.wording(step, *key)
        if "{thing}" in wording:
            shown["thing"] = draw.wording(THINGS, "thing", *key)
        if "{look}" in wording:
            shown["look"] = draw.wording(LOOKS, "look", *key)
        used |= bases_in(wording)
        sentences.append(wording.format_map(shown))
    return " ".join(sentences), used


def _charge_facts(draw: Draw, unrevealed: set[str]) -> None:
    for name in unrevealed:
        if name in OPTIONS:
            draw.charge(len(OPTIONS[name]))
        elif name in ("n", "k"):
            draw.charge(98)
