"""The sizes that device rounds are made for: all ranks make the same ones, in the same order."""

from __future__ import annotations

from dataclasses import dataclass

BucketSize = tuple[int, int]  # requests, nodes
LEAST_PASS_ROWS, MOST_PASS_ROWS = 32, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The sizes rounds are made for, ascending; a step runs in the least that holds it."""

    requests: tuple[int, ...]
    num_nodes: tuple[int, ...]

    @classmethod
    def of(cls, max_requests: int, max_budget: int) -> Buckets:
        """Powers of two up to the most requests; trees of the whole budget, or roots alone."""
        powers = [1 << k for k in range(max_requests.bit_length()) if 1 << k < max_requests]
        return cls(requests=(*powers, max_requests), num_nodes=tuple(sorted({1, 1 + max_budget})))

    def choose(self, requests: int, num_nodes: int) -> BucketSize:
        return (
            next(size for size in self.requests if size >= requests),
            next(size for size in self.num_nodes if size >= num_nodes),
        )

    def sizes(self) -> list[BucketSize]:
        """Largest first: the order in which they are made."""
        return sorted(((r, n) for r in self.requests for n in self.num_nodes), reverse=True)


def pass_sizes(prefill_chunk: int) -> tuple[int, ...]:
    """Rows that planned steps' passes have, ascending: powers of two, and at last a whole chunk.

    At most MOST_PASS_ROWS: a step of more takes a GPU longer than a host its launches.
    """
    most = min(prefill_chunk, MOST_PASS_ROWS)
    powers = (1 << k for k in range(most.bit_length()))
    return (*(size for size in powers if LEAST_PASS_ROWS <= size < most), most)
