"""The small Python functions of the text: what each computes, and bodies that compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operation:
    """One function on a list of integers.

    ``phrase`` completes "a function that ..."; ``bodies`` are the styles it is written in, where
    {x} is the list's name and {k} a constant. ``result`` is the oracle.
    """

    names: tuple[str, ...]
    phrase: str
    bodies: tuple[str, ...]
    result: Callable[[list[int], int], Any]
    uses_constant: bool = False


def _loop(start: str, line: str, end: str = "return result") -> str:
    return f"    result = {start}\n    for item in {{x}}:\n        {line}\n    {end}"


def _filter(condition: str) -> tuple[str, str]:
    return (
        _loop("[]", f"if {condition}:\n            result.append(item)"),
        f"    return [item for item in {{x}} if {condition}]",
    )


def _map(expression: str) -> tuple[str, str]:
    return (
        _loop("[]", f"result.append({expression})"),
        f"    return [{expression} for item in {{x}}]",
    )


def _count(condition: str) -> tuple[str, str]:
    return (
        _loop("0", f"if {condition}:\n            result += 1"),
        f"    return sum(1 for item in {{x}} if {condition})",
    )


OPERATIONS: Mapping[str, Operation] = {
    "total": Operation(
        ("total", "add_all"), "adds up all {x}",
        (_loop("0", "result += item"), "    return sum({x})"),
        lambda x, k: sum(x),
    ),
    "product": Operation(
        ("product", "multiply_all"), "multiplies all {x}",
        (_loop("1", "result *= item"),),
        lambda x, k: _product(x),
    ),
    "largest": Operation(
        ("largest", "find_largest"), "returns the largest of the {x}",
        (
            _loop("{x}[0]", "if item > result:\n            result = item"),
            "    return max({x})",
            "    return sorted({x})[-1]",
        ),
        lambda x, k: max(x),
    ),
    "smallest": Operation(
        ("smallest", "find_smallest"), "returns the smallest of the {x}",
        (
            _loop("{x}[0]", "if item < result:\n            result = item"),
            "    return min({x})",
            "    return sorted({x})[0]",
        ),
        lambda x, k: min(x),
    ),
    "mean": Operation(
        ("mean", "average"), "returns the average of the {x}",
        (
            "    return sum({x}) / len({x})",
            _loop("0", "result += item", "return result / len({x})"),
        ),
        lambda x, k: sum(x) / len(x),
    ),
    "spread": Operation(
        ("spread", "value_range"), "returns how far apart the largest and smallest {x} are",
        ("    return max({x}) - min({x})",),
        lambda x, k: max(x) - min(x),
    ),
    "reverse": Operation(
        ("backwards", "reverse_order"), "returns the {x} in reverse order",
        ("    return {x}[::-1]", "    return list(reversed({x}))"),
        lambda x, k: x[::-1],
    ),
    "ordered": Operation(
        ("in_order", "sort_values"), "returns the {x} from small to large",
        ("    return sorted({x})",),
        lambda x, k: sorted(x),
    ),
    "evens": Operation(
        ("keep_even", "even_only"), "keeps only the even {x}", _filter("item % 2 == 0"),
        lambda x, k: [i for i in x if i % 2 == 0],
    ),
    "odds": Operation(
        ("keep_odd", "odd_only"), "keeps only the odd {x}", _filter("item % 2 == 1"),
        lambda x, k: [i for i in x if i % 2 == 1],
    ),
    "squares": Operation(
        ("squares", "square_all"), "squares all {x}", _map("item * item"),
        lambda x, k: [i * i for i in x],
    ),
    "first": Operation(
        ("first_items", "take_first"), "returns the first {k} of the {x}",
        ("    return {x}[:{k}]",),
        lambda x, k: x[:k], uses_constant=True,
    ),
    "above": Operation(
        ("keep_above", "larger_than"), "keeps the {x} above {k}", _filter("item > {k}"),
        lambda x, k: [i for i in x if i > k], uses_constant=True,
    ),
    "below": Operation(
        ("keep_below", "smaller_than"), "keeps the {x} below {k}", _filter("item < {k}"),
        lambda x, k: [i for i in x if i < k], uses_constant=True,
    ),
    "count_above": Operation(
        ("count_above", "how_many_above"), "counts the {x} above {k}", _count("item > {k}"),
        lambda x, k: sum(i > k for i in x), uses_constant=True,
    ),
    "count_equal": Operation(
        ("count_equal", "how_many_equal"), "counts how many of the {x} are {k}",
        (*_count("item == {k}"), "    return {x}.count({k})"),
        lambda x, k: x.count(k), uses_constant=True,
    ),
    "contains": Operation(
        ("contains", "has_value"), "tells whether {k} is one of the {x}",
        ("    return {k} in {x}",),
        lambda x, k: k in x, uses_constant=True,
    ),
    "scale": Operation(
        ("scale", "multiply_each"), "multiplies each of the {x} by {k}", _map("item * {k}"),
        lambda x, k: [i * k for i in x], uses_constant=True,
    ),
    "shift": Operation(
        ("shift", "add_to_each"), "adds {k} to each of the {x}", _map("item + {k}"),
        lambda x, k: [i + k for i in x], uses_constant=True,
    ),
    "divisible": Operation(
        ("keep_divisible", "multiples"), "keeps the {x} that can be divided by {k}",
        _filter("item % {k} == 0"),
        lambda x, k: [i for i in x if i % k == 0], uses_constant=True,
    ),
}  # fmt: skip


def _product(values: list[int]) -> int:
    result = 1
    for value in values:
        result *= value
    return result
