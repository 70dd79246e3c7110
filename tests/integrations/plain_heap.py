"""The contract of SGLang's DDTree builder, written as plainly as it can be: a heap of prefixes."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple


class PlainTree(NamedTuple):
    """The seven values, as lists; `scores` [n] in nat beside them, to see near-ties."""

    tokens: list[int]
    depths: list[int]
    parents: list[int]
    child_maps: list[dict[int, int]]
    visibility: list[list[bool]]
    first_child: list[int]
    next_sibling: list[int]
    scores: list[float]


def plain_tree(logprobs: list[list[float]], ids: list[list[int]], budget: int) -> PlainTree:
    """Best-first over rank tuples, one more than the budget looked at for the scores."""
    popped: list[tuple[int, ...]] = []
    scores: list[float] = []
    width = min(budget, len(logprobs[0])) if logprobs else 0
    heap = [(-logprobs[0][0], (0,))] if width else []
    while heap and len(scores) <= budget:
        negated, ranks = heappop(heap)
        scores.append(-negated)
        popped.append(ranks)
        depth, rank = len(ranks), ranks[-1]
        if rank + 1 < width:
            step = logprobs[depth - 1][rank + 1] - logprobs[depth - 1][rank]
            heappush(heap, (negated - step, (*ranks[:-1], rank + 1)))
        if depth < len(logprobs):
            heappush(heap, (negated - logprobs[depth][0], (*ranks, 0)))
    number = {(): 0} | {ranks: i for i, ranks in enumerate(popped[:budget], start=1)}
    return _linked(number, ids, scores)


def _linked(
    number: dict[tuple[int, ...], int], ids: list[list[int]], scores: list[float]
) -> PlainTree:
    prefixes = list(number)
    token = {ranks: ids[len(ranks) - 1][ranks[-1]] for ranks in prefixes[1:]}
    children = [
        [number[other] for other in prefixes[1:] if other[:-1] == ranks] for ranks in prefixes
    ]
    next_sibling = [-1] * len(prefixes)
    for siblings in children:
        for node, following in pairwise(siblings):
            next_sibling[node] = following
    return PlainTree(
        tokens=[token[ranks] for ranks in prefixes[1:]],
        depths=[len(ranks) for ranks in prefixes[1:]],
        parents=[-1, *(number[ranks[:-1]] for ranks in prefixes[1:])],
        child_maps=[{token[prefixes[node]]: node for node in nodes} for nodes in children],
        visibility=[[ranks[: len(other)] == other for other in prefixes] for ranks in prefixes],
        first_child=[nodes[0] if nodes else -1 for nodes in children],
        next_sibling=next_sibling,
        scores=scores,
    )
