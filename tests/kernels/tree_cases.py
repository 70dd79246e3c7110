"""Candidate rows of every kind and what build_tree must make of them, for the CPU and the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kdray.core.tree import (
    ABSENT,
    SCORE_FLOOR,
    WORD_BITS,
    DraftTree,
    ancestor_mask,
    build_tree,
    quantise,
    sort_candidates,
)

Int32Array = NDArray[np.int32]
KINDS = ("flat", "peaked", "mix", "tie", "absent", "saturating", "equal", "sure", "grid")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A batch: token, score [R, L, K]; roots, base, budgets [R]."""

    token: Int32Array
    score: Int32Array
    roots: Int32Array
    base: Int32Array
    budgets: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """What a batch of trees is: [R, N] each, mask [R, N, W], num_nodes [R]."""

    token: Int32Array
    parent: Int32Array
    depth: Int32Array
    score: Int32Array
    position: Int32Array
    mask: Int32Array
    num_nodes: Int32Array
    first_child: Int32Array
    next_sibling: Int32Array

    @classmethod
    def empty(cls, requests: int, num_nodes: int, fill: int) -> Arrays:
        words = -(-num_nodes // WORD_BITS)
        flat = (requests, num_nodes)
        shapes = (*(flat,) * 5, (*flat, words), (requests,), flat, flat)
        return cls(*(np.full(shape, fill, np.int32) for shape in shapes))

    def columns(self) -> dict[str, Int32Array]:
        return {name: getattr(self, name) for name in self.__slots__}


def rows_of(
    kind: str, depth: int, width: int, rng: np.random.Generator
) -> tuple[Int32Array, Int32Array]:
    """token, score [L, K] of one request."""
    score = sort_candidates(*_unsorted(kind, depth, width, rng))[1]
    token = rng.integers(0, 163_840, score.shape).astype(np.int32)
    return token, score


def _unsorted(
    kind: str, depth: int, width: int, rng: np.random.Generator
) -> tuple[Int32Array, Int32Array]:
    shape = (depth, width)
    if kind in ("flat", "peaked", "mix", "tie"):
        score = _softmax_rows(kind, depth, width, rng)
    elif kind == "grid":  # bf16 logits of a narrow band, less a normaliser
        logits = rng.normal(size=shape).astype(np.float32)
        rough = (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        score = quantise(rough.astype(np.float64) - 4.0)
    elif kind == "absent":
        score = quantise(-rng.exponential(3.0, shape))
        score[rng.random(shape) < 0.5] = ABSENT
    elif kind == "saturating":
        score = rng.integers(SCORE_FLOOR, 0, shape).astype(np.int32)
        score[rng.random(shape) < 0.3] = -1
    elif kind == "equal":
        score = np.full(shape, -int(rng.integers(0, 5)), np.int32)
    elif kind == "sure":  # one candidate of certainty, others far below
        score = quantise(-rng.uniform(12.0, 31.5, shape))
        score[:, :1] = -rng.integers(0, 3, (depth, 1))
    else:
        raise ValueError(kind)
    return np.zeros(shape, np.int32), score


def _softmax_rows(kind: str, depth: int, width: int, rng: np.random.Generator) -> Int32Array:
    """The row kinds of the benchmark, of a vocabulary of 512."""
    spread = {
        "flat": np.full(depth, 2.0),
        "peaked": np.full(depth, 5.0),
        "mix": np.linspace(7.7, 2.45, depth),
        "tie": np.full(depth, 2.0),
    }[kind]
    logits = rng.normal(size=(depth, 512)) * spread[:, None]
    if kind == "tie":
        logits = np.round(logits * 4) / 4
    best = np.sort(logits, axis=1)[:, ::-1]
    normaliser = np.log(np.exp(best - best[:, :1]).sum(axis=1, keepdims=True)) + best[:, :1]
    return quantise((best - normaliser)[:, :width])


def case_of(
    rng: np.random.Generator,
    *,
    depth: int,
    width: int,
    budgets: Sequence[int],
    kinds: Sequence[str] = KINDS,
) -> Case:
    """A batch whose requests go through the kinds in turn."""
    count = len(budgets)
    rows = [rows_of(kinds[r % len(kinds)], depth, width, rng) for r in range(count)]
    return Case(
        token=np.array([token for token, _ in rows], np.int32).reshape(count, depth, width),
        score=np.array([score for _, score in rows], np.int32).reshape(count, depth, width),
        roots=rng.integers(0, 163_840, count).astype(np.int32),
        base=rng.integers(0, 100_000, count).astype(np.int32),
        budgets=np.array(budgets, np.int32),
    )


def expected(case: Case, num_nodes: int) -> Arrays:
    """core.tree's trees, padded as ReferenceOps pads them, with positions and links."""
    out = Arrays.empty(len(case.budgets), num_nodes, 0)
    out.parent[:], out.score[:] = -1, ABSENT
    out.first_child[:], out.next_sibling[:] = -1, -1
    out.position[:] = case.base[:, None]
    node = np.arange(num_nodes)
    bit = np.left_shift(np.uint32(1), (node % WORD_BITS).astype(np.uint32))
    out.mask.view(np.uint32)[:, node, node // WORD_BITS] = bit
    for r, budget in enumerate(case.budgets.tolist()):
        tree = build_tree(case.roots[r], case.token[r], case.score[r], min(budget, num_nodes - 1))
        _write(out, r, tree)
    return out


def _write(out: Arrays, r: int, tree: DraftTree) -> None:
    own = slice(0, tree.num_nodes)
    out.token[r, own], out.parent[r, own] = tree.token, tree.parent
    out.depth[r, own], out.score[r, own] = tree.depth, tree.score
    out.position[r, own] += tree.depth
    words = ancestor_mask(tree.parent)
    out.mask[r, own, : words.shape[1]] = words.view(np.int32)
    out.num_nodes[r] = tree.num_nodes
    newest: dict[int, int] = {}
    for node, parent in enumerate(tree.parent.tolist()):
        if node == 0:
            continue
        if parent in newest:
            out.next_sibling[r, newest[parent]] = node
        else:
            out.first_child[r, parent] = node
        newest[parent] = node
