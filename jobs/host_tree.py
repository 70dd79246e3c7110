"""The draft tree as serving engines build it on the host today: one request at a time, by a heap.

Written from the description of the DDTree ports: log-probs and ids come from the device, a heap of
(negated sum, ranks) gives node after node, and what the engine needs goes back: ids, depths,
parents, child maps, visibility, first children and next siblings.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HostTree:
    """n drafted nodes behind a root; node 0 is the root.

    token, depth   [n] int64              of the drafted nodes
    parent         n + 1 integers, -1 for the root
    children       n + 1 maps from token to node
    visible        [n + 1, n + 1] bool    row i sees itself, its ancestors and the root
    first_child, next_sibling  [n + 1] int64, -1 where there is none
    """

    token: Tensor
    depth: Tensor
    parent: list[int]
    children: list[dict[int, int]]
    visible: Tensor
    first_child: Tensor
    next_sibling: Tensor


def build_host_trees(logprob: Tensor, token: Tensor, budget: int) -> list[HostTree]:
    """[R, L, K] on a device -> R trees on that device."""
    return [build_host_tree(logprob[r], token[r], budget) for r in range(len(token))]


def build_host_tree(logprob: Tensor, token: Tensor, budget: int) -> HostTree:
    """[L, K] log-probs, best first, and their ids."""
    device = token.device
    width = min(budget, token.shape[1])
    rows = logprob[:, :width].to("cpu", torch.float32).tolist()
    ids = token[:, :width].to("cpu", torch.int64).tolist()
    tokens, depths, parent = _best_first(rows, ids, budget)
    children, first, following = _links(tokens, parent)
    visible = _visibility(parent)
    return HostTree(
        token=torch.tensor(tokens, dtype=torch.int64).to(device),
        depth=torch.tensor(depths, dtype=torch.int64).to(device),
        parent=parent,
        children=children,
        visible=torch.from_numpy(visible).to(device),
        first_child=torch.tensor(first, dtype=torch.int64).to(device),
        next_sibling=torch.tensor(following, dtype=torch.int64).to(device),
    )


def _best_first(
    rows: list[list[float]], ids: list[list[int]], budget: int
) -> tuple[list[int], list[int], list[int]]:
    """Tokens and depths of the drafted nodes, parents of all nodes, in the order of the heap."""
    tokens: list[int] = []
    depths: list[int] = []
    parent = [-1]
    if budget <= 0 or not rows or not rows[0]:
        return tokens, depths, parent
    # (negated sum, ranks from the root, parent, depth, rank)
    heap = [(-rows[0][0], (0,), 0, 1, 0)]
    while heap and len(tokens) < budget:
        negated, ranks, above, depth, rank = heappop(heap)
        node = len(parent)
        tokens.append(ids[depth - 1][rank])
        depths.append(depth)
        parent.append(above)
        row = rows[depth - 1]
        if rank + 1 < len(row):
            sibling = negated + row[rank] - row[rank + 1]
            heappush(heap, (sibling, (*ranks[:-1], rank + 1), above, depth, rank + 1))
        if depth < len(rows):
            heappush(heap, (negated - rows[depth][0], (*ranks, 0), node, depth + 1, 0))
    return tokens, depths, parent


def _links(
    tokens: list[int], parent: list[int]
) -> tuple[list[dict[int, int]], list[int], list[int]]:
    children: list[dict[int, int]] = [{} for _ in parent]
    first, following = [-1] * len(parent), [-1] * len(parent)
    newest = [-1] * len(parent)
    for node in range(1, len(parent)):
        above = parent[node]
        children[above][tokens[node - 1]] = node
        if newest[above] < 0:
            first[above] = node
        else:
            following[newest[above]] = node
        newest[above] = node
    return children, first, following


def _visibility(parent: list[int]) -> np.ndarray:
    visible = np.zeros((len(parent), len(parent)), dtype=np.bool_)
    visible[0, 0] = True
    for node in range(1, len(parent)):
        visible[node, :node] = visible[parent[node], :node]
        visible[node, node] = True
    return visible
