"""Word problems with worked steps, and plain sums."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kdray.demo.text.arithmetic import (
    LARGEST_TERM,
    difference_is_held_out,
    draw_difference,
    draw_sum,
    sum_is_held_out,
)
from kdray.demo.text.document import Exchange, Fact, Verdict
from kdray.demo.text.draw import Draw
from kdray.demo.text.words import GIRLS, NAMES, UNITS

Numbers = dict[str, Fact]


@dataclass(frozen=True)
class Problem:
    """Prompt wordings, answer wordings, and how the numbers are drawn."""

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    numbers: Callable[[Draw, bool], Numbers]


def _sum(draw: Draw, held_out: bool) -> Numbers:
    a, b = draw_sum(draw, held_out)
    return {"a": a, "b": b, "result": a + b}


def _difference(draw: Draw, held_out: bool) -> Numbers:
    a, b = draw_difference(draw, held_out)
    return {"a": a, "b": b, "result": a - b}


def _sum_then_difference(draw: Draw, held_out: bool) -> Numbers:
    while True:
        a, b = draw_sum(draw, held_out)
        middle, c = a + b, draw.number(2, LARGEST_TERM)
        if c < middle and difference_is_held_out(middle, c) == held_out:
            return {"a": a, "b": b, "c": c, "middle": middle, "result": middle - c}


def _two_sums(draw: Draw, held_out: bool) -> Numbers:
    while True:
        a, b = draw_sum(draw, held_out)
        middle, c = a + b, draw.number(2, LARGEST_TERM)
        if middle <= LARGEST_TERM and sum_is_held_out(middle, c) == held_out:
            return {"a": a, "b": b, "c": c, "middle": middle, "result": middle + c}


def _product(draw: Draw, held_out: bool) -> Numbers:
    a, b = draw.number(2, 9), draw.number(2, 9)
    return {"a": a, "b": b, "result": a * b}


PROBLEMS: Mapping[str, Problem] = {
    "gain": Problem(
        (
            "{name} has {a} {unit}. {other} gives {him} {b} more. How many does {name} have now?",
            "{name} found {a} {unit} in the morning and {b} in the evening. How many is that?",
            "There are {a} {unit} in a box. {name} puts in {b} more. How many are in the box?",
            "{name} has {a} {unit} and {other} has {b}. How many {unit} do they have together?",
        ),
        (
            "We add the two numbers. {a} + {b} = {result}. The answer is {result} {unit}.",
            "First {a}, then {b} more. {a} + {b} = {result}. The answer is {result} {unit}.",
        ),
        _sum,
    ),
    "loss": Problem(
        (
            "{name} has {a} {unit} and gives {b} of them to {other}. How many {unit} are left?",
            "{name} had {a} {unit} but lost {b}. How many {unit} does {he} still have?",
            "{name} has {a} {unit}. {other} has {b} fewer. How many {unit} does {other} have?",
        ),
        (
            "We take the second number away. {a} - {b} = {result}. The answer is {result} {unit}.",
            "From {a} we take {b}. {a} - {b} = {result}. The answer is {result} {unit}.",
        ),
        _difference,
    ),
    "gain_loss": Problem(
        (
            "{name} has {a} {unit}, gets {b} more and then loses {c}. How many {unit} are left?",
            "A shop has {a} {unit}. {b} more arrive, and {c} are sold. How many {unit} are left?",
        ),
        (
            "First we add: {a} + {b} = {middle}. Then we take away: {middle} - {c} = {result}. "
            "The answer is {result} {unit}.",
        ),
        _sum_then_difference,
    ),
    "gain_gain": Problem(
        (
            "{name} has {a} {unit}, gets {b} from {other} and buys {c}. How many {unit} is that?",
            "In three boxes there are {a}, {b} and {c} {unit}. How many {unit} are there?",
        ),
        (
            "First we add two of them: {a} + {b} = {middle}. Then the third: "
            "{middle} + {c} = {result}. The answer is {result} {unit}.",
        ),
        _two_sums,
    ),
    "groups": Problem(
        (
            "{name} has {a} bags with {b} {unit} in each. How many {unit} does {he} have?",
            "{a} children have {b} {unit} each. How many {unit} is that?",
        ),
        ("{a} times {b} is {result}. The answer is {result} {unit}.",),
        _product,
    ),
    "plus": Problem(
        ("What is {a} + {b}?", "How much is {a} + {b}?", "{a} + {b} = ?"),
        ("{a} + {b} = {result}.",),
        _sum,
    ),
    "minus": Problem(
        ("What is {a} - {b}?", "How much is {a} - {b}?", "{a} - {b} = ?"),
        ("{a} - {b} = {result}.",),
        _difference,
    ),
}
_DRAWN = (
    "gain", "gain", "gain", "loss", "loss", "gain_loss", "gain_gain", "groups",
    "plus", "plus", "minus", "minus",
)  # fmt: skip


def make_problem(draw: Draw, held_out: bool = False) -> Exchange:
    """A problem with its worked answer; ``held_out`` takes a sum never shown in training.

    Products are tables to be learnt by heart: none is held out.
    """
    start = draw.nats
    name = draw.fact(_DRAWN)
    problem = PROBLEMS[name]
    facts: dict[str, Fact] = {**problem.numbers(draw, held_out), "problem": name}
    facts["unit"] = draw.fact(UNITS)
    who, other = draw.fact(NAMES), draw.fact(NAMES)
    while other == who:
        other = draw.fact(NAMES)
    girl = who in GIRLS
    shown = {**facts, "name": who, "other": other, "he": "she" if girl else "he"}
    shown["him"] = "her" if girl else "him"
    prompt = draw.fact(problem.prompts).format_map(shown)
    answer = draw.wording(problem.answers, "problem", name, str(facts["unit"]))
    return Exchange("problem", prompt, answer.format_map(shown), facts, draw.nats - start)


def check_problem(facts: Mapping[str, Fact], answer: str) -> Verdict:
    """Strict: a wording of the grammar. Facts: the last number is the result, every sum holds."""
    problem = PROBLEMS[str(facts["problem"])]
    text = answer.strip()
    if text in {wording.format_map(facts) for wording in problem.answers}:
        return Verdict(True, True)
    numbers = re.findall(r"\d+", text)
    right = bool(numbers) and int(numbers[-1]) == facts["result"] and _sums_hold(text)
    return Verdict(False, right, f"{text!r} is no worked answer with {facts['result']}")


def _sums_hold(text: str) -> bool:
    sums = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", text)
    return all(
        (int(a) + int(b) if sign == "+" else int(a) - int(b)) == int(result)
        for a, sign, b, result in sums
    )
