"""The range of the text's sums, and which pairs of numbers are held out.

Sums are a + b with both from 2 to 99, so results reach 198 and carries over 100 are included.
Differences are a - b with a from 4 to 198 and b from 2 to a - 2.
"""

from __future__ import annotations

from kdray.demo.text.draw import Draw, is_held_out

LARGEST_TERM = 99
LARGEST_RESULT = 2 * LARGEST_TERM
HELD_OUT_SHARE = 0.04


def sum_is_held_out(a: int, b: int) -> bool:
    """Whether a + b (in either order) is never shown in training text."""
    return is_held_out(HELD_OUT_SHARE, "sum", min(a, b), max(a, b))


def difference_is_held_out(a: int, b: int) -> bool:
    """Whether a - b is never shown in training text."""
    return is_held_out(HELD_OUT_SHARE, "difference", a, b)


def draw_sum(draw: Draw, held_out: bool) -> tuple[int, int]:
    """Two terms, from the held-out pairs or from the others."""
    while True:
        a, b = draw.number(2, LARGEST_TERM), draw.number(2, LARGEST_TERM)
        if sum_is_held_out(a, b) == held_out:
            return a, b


def draw_difference(draw: Draw, held_out: bool, largest: int = LARGEST_RESULT) -> tuple[int, int]:
    """A number up to ``largest`` and a smaller one to take from it."""
    while True:
        a = draw.number(4, largest)
        b = draw.number(2, min(a - 2, LARGEST_TERM))
        if difference_is_held_out(a, b) == held_out:
            return a, b
