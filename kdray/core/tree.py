"""DDTree (arXiv 2604.12989): the best draft tree of B nodes out of L independent token rows.

A drafter gives, for each of the next L positions, K tokens with log-probs, each row blind to the
others. A node of the tree is a prefix of such tokens and its score is the sum of their log-probs;
the B best prefixes form a tree by themselves, since a prefix never scores below its extensions.

Scores are integers. A log-prob is rounded once to fixed point and sums are exact from there on, so
every implementation agrees bit for bit. Nodes are ordered by score descending, depth ascending,
parent's node number ascending, rank in the row ascending: no two nodes are alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int32Array = NDArray[np.int32]
Uint32Array = NDArray[np.uint32]

FRACTION_BITS = 22
MIN_LOGPROB = -31.5  # nat; less likely tokens are all alike
SCORE_FLOOR = -(2**27) + 1  # sums saturate here: 28 bits hold any score
ABSENT = int(np.iinfo(np.int32).min)  # the score of a candidate that is not there
WORD_BITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """N = 1 + drafts nodes in the order of the score contract; node 0 is the root.

    token, parent, depth, score   [N] int32; parent[0] = -1 and parent[i] < i, depth and score of
                                  the root are 0, scores are fixed point (FRACTION_BITS)
    """

    token: Int32Array
    parent: Int32Array
    depth: Int32Array
    score: Int32Array

    @property
    def num_nodes(self) -> int:
        """Nodes, root counted."""
        return len(self.token)


@dataclass(frozen=True, slots=True)
class Path:
    """The way the target took through a tree.

    node    node numbers from the root on
    bonus   the target's token after the last of them
    """

    node: tuple[int, ...]
    bonus: int

    @property
    def num_accepted_drafts(self) -> int:
        return len(self.node) - 1

    @property
    def accept_length(self) -> int:
        """Tokens the step gained: the accepted drafts and the bonus token."""
        return self.num_accepted_drafts + 1


def build_tree(root: int, token: ArrayLike, score: ArrayLike, budget: int) -> DraftTree:
    """The best `budget` prefixes as a tree; fewer where the candidates do not suffice.

    token, score   [L, K] int32: every row by score descending, absent candidates (ABSENT) last
    """
    token, score = _check_candidates(token, score)
    width = max(budget, 0)  # no node within the budget has a rank beyond it
    tokens, scores = token[:, :width].tolist(), score[:, :width].tolist()
    tree_token, tree_parent, tree_depth, tree_score = [int(root)], [-1], [0], [0]
    # The frontier holds, for every node, its best child not yet taken.
    frontier: list[tuple[int, int, int, int]] = []
    _push(frontier, scores, parent=0, parent_score=0, depth=1, rank=0)
    while frontier and len(tree_token) <= budget:
        negated, depth, parent, rank = heappop(frontier)
        node = len(tree_token)
        tree_token.append(tokens[depth - 1][rank])
        tree_parent.append(parent)
        tree_depth.append(depth)
        tree_score.append(-negated)
        _push(frontier, scores, parent, tree_score[parent], depth, rank + 1)  # next sibling
        _push(frontier, scores, node, -negated, depth + 1, 0)  # first child
    columns = (tree_token, tree_parent, tree_depth, tree_score)
    return DraftTree(*(np.array(column, dtype=np.int32) for column in columns))


def _push(
    frontier: list[tuple[int, int, int, int]],
    scores: list[list[int]],
    parent: int,
    parent_score: int,
    depth: int,
    rank: int,
) -> None:
    """Queue the child of `parent` with this rank, unless the rows end here."""
    if depth > len(scores) or rank >= len(scores[depth - 1]):
        return
    own = scores[depth - 1][rank]
    if own != ABSENT:
        heappush(frontier, (-max(parent_score + own, SCORE_FLOOR), depth, parent, rank))


def _check_candidates(token: ArrayLike, score: ArrayLike) -> tuple[Int32Array, Int32Array]:
    token, score = np.asarray(token, dtype=np.int32), np.asarray(score, dtype=np.int32)
    if token.ndim != 2 or token.shape != score.shape:
        raise ValueError(
            f"token and score must both be [L, K], got {token.shape} and {score.shape}"
        )
    if (score[:, 1:] > score[:, :-1]).any():
        raise ValueError("candidates must stand by score descending; call sort_candidates first")
    if (score[:, :1] > 0).any():
        raise ValueError("a score is a log-prob and must not exceed 0; make it with quantise")
    return token, score


def quantise(logprob: ArrayLike) -> Int32Array:
    """Log-probs [..] in nat to fixed point; NaN and -inf become ABSENT.

    Clamped to [MIN_LOGPROB, 0], rounded half to even. float64 holds every step exactly.
    """
    exact = np.asarray(logprob, dtype=np.float64)
    absent = np.isnan(exact) | np.isneginf(exact)
    clamped = np.clip(np.where(absent, 0.0, exact), MIN_LOGPROB, 0.0)
    fixed = np.rint(clamped * 2.0**FRACTION_BITS).astype(np.int32)
    return np.where(absent, np.int32(ABSENT), fixed)


def sort_candidates(token: ArrayLike, score: ArrayLike) -> tuple[Int32Array, Int32Array]:
    """Rows [L, K] by score descending, absent ones last; equal scores keep their order."""
    token, score = np.asarray(token, dtype=np.int32), np.asarray(score, dtype=np.int32)
    order = np.argsort(-score.astype(np.int64), axis=-1, kind="stable")
    return np.take_along_axis(token, order, axis=-1), np.take_along_axis(score, order, axis=-1)


def validate(parent: ArrayLike) -> None:
    """Raise ValueError unless parent [N] is a tree: parent[0] = -1, then 0 <= parent[i] < i."""
    parent = np.asarray(parent)
    if parent.ndim != 1 or len(parent) == 0:
        raise ValueError(f"parent must be [N] with N >= 1, got shape {parent.shape}")
    bad = (parent < 0) | (parent >= np.arange(len(parent)))
    bad[0] = parent[0] != -1
    if bad.any():
        node = int(bad.argmax())
        raise ValueError(
            f"node {node} has parent {int(parent[node])}; it must be "
            + ("-1" if node == 0 else f"from 0 to {node - 1}")
        )


def ancestor_mask(parent: ArrayLike) -> Uint32Array:
    """Who sees whom: [N, W] words, W = ceil(N / 32).

    Bit j % 32 of word j // 32 in row i is set where node j is node i or an ancestor of it.
    """
    validate(parent)
    rows: list[int] = []
    for node, above in enumerate(np.asarray(parent).tolist()):
        rows.append(1 << node | (rows[above] if node else 0))
    words = -(-len(rows) // WORD_BITS)
    packed = b"".join(row.to_bytes(4 * words, "little") for row in rows)
    return np.frombuffer(packed, dtype="<u4").reshape(len(rows), words).astype(np.uint32)


def mask_to_bool(mask: NDArray[Any], num_nodes: int) -> NDArray[np.bool_]:
    """Words [.., W] (uint32, or int32 of the same bits) to [.., num_nodes] booleans."""
    bits = np.arange(WORD_BITS, dtype=np.uint32)
    unpacked = (mask.astype(np.uint32)[..., None] >> bits & 1).astype(np.bool_)
    return unpacked.reshape(*mask.shape[:-1], -1)[..., :num_nodes]


def follow(tree: DraftTree, target: ArrayLike) -> Path:
    """From the root on, step to the child that bears the target's token; stop where none does.

    target   [N] the token the target draws after each node. Of children with the same token the
             lowest node number is taken. Raises ValueError for a malformed tree.
    """
    validate(tree.parent)
    drawn: list[int] = np.asarray(target).tolist()
    path = tuple(_walk(tree.token.tolist(), tree.parent.tolist(), drawn))
    return Path(node=path, bonus=drawn[path[-1]])


def _walk(token: list[int], parent: list[int], drawn: list[int]) -> Iterator[int]:
    """One pass suffices: children stand behind their parent, the lowest number first."""
    here = 0
    yield here
    for node in range(1, len(token)):
        if parent[node] == here and token[node] == drawn[here]:
            here = node
            yield here
