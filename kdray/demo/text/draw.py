"""Seeded choices: facts uniformly, wordings skewed by a hash, and a count of both."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")

SKEW = 0.6
"""Share of wordings taken from the hash of two facts; the rest are uniform."""


@lru_cache(maxsize=1 << 16)
def hash_of(*parts: str | int) -> int:
    """A 32-bit hash that is the same in every process and on every machine."""
    return crc32("|".join(map(str, parts)).encode())


def is_held_out(share: float, *parts: str | int) -> bool:
    """Whether a tuple of slots belongs to the held-out ``share`` of all such tuples."""
    return hash_of("held-out", *parts) % 10_000 < share * 10_000


class Draw:
    """A source of choices that adds up their information in ``nats``.

    A *fact* must later be copied or computed with, so it is never predictable from a hash.
    A *wording* is only how something is said: skewing it keeps greedy text from collapsing to one
    favourite sentence, as the favourite then depends on the facts.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.nats = 0.0

    def fact(self, options: Sequence[T]) -> T:
        """A uniform choice. Charged by the caller, if the prompt does not reveal it."""
        return options[int(self.rng.random() * len(options))]

    def wording(self, options: Sequence[T], *key: str | int) -> T:
        """With probability ``SKEW`` the favourite of ``key``, else uniform. Charged."""
        count = len(options)
        if count == 1:
            return options[0]
        favourite = hash_of(*key) % count
        index = favourite
        if self.rng.random() >= SKEW:
            index = int(self.rng.random() * count)
        self.nats -= math.log((SKEW if index == favourite else 0.0) + (1 - SKEW) / count)
        return options[index]

    def charge(self, count: int) -> None:
        """Count a uniform choice among ``count`` options."""
        self.nats += math.log(count)

    def chance(self, probability: float) -> bool:
        """True with ``probability``; not charged."""
        return self.rng.random() < probability

    def number(self, low: int, high: int) -> int:
        """A uniform integer with both ends included; not charged."""
        return low + int(self.rng.random() * (high - low + 1))
