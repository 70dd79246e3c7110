"""Random INT4 weights without a mean, eight in a word or more.

Of -8 .. 7, each as likely, the mean is -1/2. That little is the same for every output: it makes the
outputs one another's copies, and a deep model's activations explode.
"""

from __future__ import annotations

from typing import Any

UNIFORM_STD = 17.5**0.5  # of q in -7 .. 7, 0 twice as likely as the others


def balanced(words: Any, ones: Any) -> Any:
    """Integers of any array whose 4-bit parts are all random: where one stands for -8, now for 0.

    ones: 1 in every part, of the words' type.
    """
    some = words | words >> 1 | words >> 2 | words >> 3
    return words | (~some & ones) << 3
