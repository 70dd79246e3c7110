"""Batches of random draft trees, sound and broken, and targets that walk far into them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kdray.core.plan import DraftTrees

Int32Array = NDArray[np.int32]
ANYTHING = np.array([-(2**31), -7, -1, 0, 1, 2, 2**30, 2**31 - 1], dtype=np.int64)


def random_trees(
    rng: np.random.Generator, requests: int, nodes: int, *, bushy: float
) -> DraftTrees:
    """[R, N] trees of any size up to N with few distinct tokens, so that siblings share some.

    bushy   0: every node hangs on the one before it; 1: on any before it
    """
    number = np.arange(nodes)
    anywhere = (rng.random((requests, nodes)) * np.maximum(number, 1)).astype(np.int32)
    parent = np.where(rng.random((requests, nodes)) < bushy, anywhere, number - 1)
    parent[:, 0] = -1
    token = rng.integers(0, 4, (requests, nodes))
    counts = np.where(rng.random(requests) < 0.5, nodes, rng.integers(1, nodes + 1, requests))
    return as_trees(token, parent, counts)


def walking_target(rng: np.random.Generator, trees: DraftTrees, far: float) -> torch.Tensor:
    """[R, N] drawn tokens; with probability `far` a node draws the token of a child, if it has."""
    token, parent = trees.token.numpy(), trees.parent.numpy()
    requests, nodes = token.shape
    target = rng.integers(0, 4, token.shape).astype(np.int32)
    for node in rng.permutation(np.arange(1, nodes)):
        above = parent[:, node]
        row = np.flatnonzero((above >= 0) & (rng.random(requests) < far))
        target[row, above[row]] = token[row, node]
    return torch.from_numpy(target)


def break_trees(rng: np.random.Generator, trees: DraftTrees) -> DraftTrees:
    """The same trees, most with a parent or a count that cannot be."""
    parent = trees.parent.numpy().copy()
    counts = trees.num_nodes.numpy().astype(np.int64)
    requests, nodes = parent.shape
    row = np.arange(requests)
    how = rng.integers(0, 4, requests)
    where = rng.integers(0, nodes, requests)
    wild = np.concatenate([ANYTHING, [nodes - 1, nodes, nodes + 1]])
    # A wild parent, a cycle (a parent behind its child), a wild count, or nothing at all.
    parent[row, where] = np.select(
        [how == 0, how == 1],
        [rng.choice(wild, requests), rng.integers(where, nodes)],
        parent[row, where],
    )
    counts = np.where(how == 2, rng.choice(wild, requests), counts)
    return as_trees(trees.token.numpy(), parent, counts)


def is_broken(trees: DraftTrees) -> NDArray[np.bool_]:
    """[R]: a count outside 1 .. N, a root with a parent, a node not behind its parent."""
    parent, counts = trees.parent.numpy(), trees.num_nodes.numpy()[:, None]
    number = np.arange(parent.shape[1])
    bad = (parent < 0) | (parent >= number)
    bad[:, 0] = parent[:, 0] != -1
    impossible = (counts < 1) | (counts > parent.shape[1])
    broken: NDArray[np.bool_] = (bad & (number < counts)).any(axis=1) | impossible[:, 0]
    return broken


def as_trees(token: NDArray, parent: NDArray, counts: NDArray) -> DraftTrees:
    """Trees without what following a path does not read: depths, scores, masks."""
    columns = [torch.from_numpy(array.astype(np.int32)) for array in (token, parent, counts)]
    unread = torch.zeros_like(columns[0])
    return DraftTrees(
        token=columns[0],
        parent=columns[1],
        depth=unread,
        score=unread,
        mask=unread[:, :, None],
        num_nodes=columns[2],
    )
