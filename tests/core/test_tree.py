"""The tree builder against brute force over all prefixes, and what its callers rely on."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdray.core.tree import (
    ABSENT,
    MIN_LOGPROB,
    SCORE_FLOOR,
    DraftTree,
    ancestor_mask,
    build_tree,
    follow,
    mask_to_bool,
    quantise,
    sort_candidates,
    validate,
)

ROOT = 7


@st.composite
def candidate_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Sorted rows [L, K] with few different tokens and scores: ties and duplicates everywhere."""
    depth, width = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    lowest = quantise(MIN_LOGPROB).item()
    scores = st.sampled_from([0, -1, -2, -3, -4, lowest, lowest + 1, ABSENT])
    cells = depth * width
    score = draw(st.lists(scores, min_size=cells, max_size=cells))
    token = draw(st.lists(st.integers(0, 3), min_size=cells, max_size=cells))
    shape = (depth, width)
    return sort_candidates(np.reshape(token, shape), np.reshape(score, shape))


def every_prefix(score: np.ndarray) -> list[tuple[int, ...]]:
    """All rank prefixes without an absent candidate, in the order of the score contract."""
    depth, width = score.shape

    def total(ranks: tuple[int, ...]) -> int:
        value = 0
        for level, rank in enumerate(ranks):
            value = max(value + int(score[level, rank]), SCORE_FLOOR)
        return value

    def key(ranks: tuple[int, ...]) -> tuple[Any, ...]:
        # Numbers compare as the keys that gave them, so the parent's key stands for its number.
        return (-total(ranks), len(ranks), key(ranks[:-1]), ranks[-1]) if ranks else ()

    prefixes = [
        ranks
        for length in range(1, depth + 1)
        for ranks in itertools.product(range(width), repeat=length)
        if all(score[level, rank] != ABSENT for level, rank in enumerate(ranks))
    ]
    return sorted(prefixes, key=key)


def columns(tree: DraftTree) -> list[list[int]]:
    return [column.tolist() for column in (tree.token, tree.parent, tree.depth, tree.score)]


@given(candidate_rows(), st.integers(0, 40))
def test_tree_is_the_best_prefixes_in_order(
    rows: tuple[np.ndarray, np.ndarray], budget: int
) -> None:
    token, score = rows
    best = every_prefix(score)[:budget]
    number = {(): 0} | {ranks: i + 1 for i, ranks in enumerate(best)}
    tree = build_tree(ROOT, token, score, budget)
    assert tree.num_nodes == 1 + len(best)
    assert tree.token.tolist() == [ROOT, *(int(token[len(r) - 1, r[-1]]) for r in best)]
    assert tree.parent.tolist() == [-1, *(number[r[:-1]] for r in best)]
    assert tree.depth.tolist() == [0, *(len(r) for r in best)]
    sums = [sum(int(score[level, rank]) for level, rank in enumerate(r)) for r in best]
    assert tree.score.tolist() == [0, *(max(value, SCORE_FLOOR) for value in sums)]


@given(candidate_rows(), st.integers(0, 20), st.integers(0, 20))
def test_a_smaller_tree_is_the_beginning_of_a_larger_one(
    rows: tuple[np.ndarray, np.ndarray], small: int, more: int
) -> None:
    little = build_tree(ROOT, *rows, small)
    large = build_tree(ROOT, *rows, small + more)
    assert columns(little) == [column[: little.num_nodes] for column in columns(large)]


@given(candidate_rows(), st.integers(0, 40))
def test_mask_is_reachability(rows: tuple[np.ndarray, np.ndarray], budget: int) -> None:
    tree = build_tree(ROOT, *rows, budget)
    validate(tree.parent)
    n = tree.num_nodes
    expected = np.zeros((n, n), dtype=bool)
    for node in range(n):
        above = node
        while above != -1:
            expected[node, above] = True
            above = int(tree.parent[above])
    mask = ancestor_mask(tree.parent)
    assert mask.dtype == np.uint32 and mask.shape == (n, -(-n // 32))
    assert np.array_equal(mask_to_bool(mask, n), expected)
    assert np.array_equal(mask_to_bool(mask.view(np.int32), n), expected)


@pytest.mark.parametrize("num_nodes", [1, 31, 32, 33, 64, 65])
def test_mask_of_a_chain_fills_words_from_the_low_bit(num_nodes: int) -> None:
    mask = ancestor_mask(np.arange(num_nodes) - 1)
    assert mask[num_nodes - 1].tolist() == [
        (1 << min(32, num_nodes - 32 * word)) - 1 for word in range(-(-num_nodes // 32))
    ]


@given(candidate_rows(), st.integers(0, 20), st.integers(0, 20), st.integers(0, 2**20))
def test_more_nodes_never_shorten_the_accepted_path(
    rows: tuple[np.ndarray, np.ndarray], small: int, more: int, model: int
) -> None:
    def accept_length(budget: int) -> int:
        tree = build_tree(ROOT, *rows, budget)
        return follow(tree, greedy_targets(tree, model)).accept_length

    assert 1 <= accept_length(small) <= accept_length(small + more)


def greedy_targets(tree: DraftTree, model: int) -> list[int]:
    """A target whose next token is a function of the prefix alone."""
    prefixes: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token.tolist(), tree.parent.tolist(), strict=True):
        prefixes.append((*(prefixes[parent] if parent >= 0 else ()), token))
    return [hash((model, prefix)) % 4 for prefix in prefixes]


@given(candidate_rows(), st.integers(0, 20), st.integers(0, 2**20))
def test_followed_tokens_are_what_plain_decoding_says(
    rows: tuple[np.ndarray, np.ndarray], budget: int, model: int
) -> None:
    tree = build_tree(ROOT, *rows, budget)
    path = follow(tree, greedy_targets(tree, model))
    prefix: tuple[int, ...] = (ROOT,)
    for token in [*(int(tree.token[node]) for node in path.node[1:]), path.bonus]:
        assert token == hash((model, prefix)) % 4
        prefix = (*prefix, token)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_without_candidates_the_tree_is_its_root(shape: tuple[int, int]) -> None:
    empty = np.zeros(shape, dtype=np.int32)
    assert columns(build_tree(ROOT, empty, empty, 5)) == [[ROOT], [-1], [0], [0]]


def test_absent_candidates_make_no_nodes() -> None:
    token = np.zeros((2, 2), dtype=np.int32)
    absent = np.full((2, 2), ABSENT)
    assert build_tree(ROOT, token, absent, 5).num_nodes == 1
    second_row_absent = [[-1, ABSENT], [ABSENT, ABSENT]]
    assert build_tree(ROOT, token, second_row_absent, 5).num_nodes == 2


@pytest.mark.parametrize("budget", [0, -1])
def test_budget_zero_is_plain_decoding(budget: int) -> None:
    assert build_tree(ROOT, [[1]], [[-1]], budget).num_nodes == 1


def test_one_candidate_per_depth_is_a_chain() -> None:
    tree = build_tree(ROOT, [[0], [0], [5]], [[-9], [0], [-1]], 8)
    assert tree.token.tolist() == [ROOT, 0, 0, 5]
    assert tree.parent.tolist() == [-1, 0, 1, 2]
    assert tree.score.tolist() == [0, -9, -9, -10]


def test_sums_saturate_at_the_floor() -> None:
    lowest = quantise(-1e9).item()
    tree = build_tree(ROOT, [[1], [2], [3]], [[lowest]] * 3, 3)
    assert tree.score.tolist() == [0, lowest, SCORE_FLOOR, SCORE_FLOOR]


def test_unsorted_rows_are_refused_and_can_be_sorted() -> None:
    token, score = [[1, 2, 3, 4]], [[-5, ABSENT, -1, -5]]
    with pytest.raises(ValueError, match="sort_candidates"):
        build_tree(ROOT, token, score, 4)
    token, score = sort_candidates(token, score)
    assert token.tolist() == [[3, 1, 4, 2]]
    assert score.tolist() == [[-1, -5, -5, ABSENT]]
    assert build_tree(ROOT, token, score, 4).token.tolist() == [ROOT, 3, 1, 4]


def test_sorting_keeps_equal_candidates_in_order() -> None:
    token = np.arange(500)[None]
    assert sort_candidates(token, -(token % 2))[0].tolist() == [
        [*range(0, 500, 2), *range(1, 500, 2)]
    ]


def test_wrong_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[L, K\]"):
        build_tree(ROOT, [1, 2], [-1, -2], 4)
    with pytest.raises(ValueError, match=r"\[L, K\]"):
        build_tree(ROOT, [[1, 2]], [[-1]], 4)
    with pytest.raises(ValueError, match="quantise"):
        build_tree(ROOT, [[1]], [[1]], 4)


def test_quantise_rounds_half_to_even_and_clamps() -> None:
    step = 2.0**-22
    logprob = [0.0, -0.5 * step, -1.5 * step, -2.5 * step, -31.5, -32.0, 3.0, np.inf]
    expected = [0, 0, -2, -2, -132120576, -132120576, 0, 0]
    assert quantise(logprob).tolist() == expected
    assert quantise(np.array(logprob, dtype=np.float32)).tolist() == expected
    assert quantise([np.nan, -np.inf]).tolist() == [ABSENT, ABSENT]


@given(st.floats(width=32, min_value=MIN_LOGPROB, max_value=0))
def test_quantise_is_exact_to_half_a_step(logprob: float) -> None:
    assert abs(quantise(np.float32(logprob)).item() - logprob * 2.0**22) <= 0.5


def test_follow_takes_the_lower_of_two_alike_children() -> None:
    tree = build_tree(ROOT, [[4, 4], [0, 1]], [[-1, -2], [-1, -3]], 6)
    assert tree.token.tolist() == [ROOT, 4, 4, 0, 0, 1, 1]
    path = follow(tree, [4, 0, 9, 5, 9, 9, 9])
    assert path.node == (0, 1, 3) and path.bonus == 5
    assert path.num_accepted_drafts == 2 and path.accept_length == 3


def test_follow_accepts_token_zero_and_stops_at_the_first_miss() -> None:
    tree = build_tree(ROOT, [[0], [0]], [[-1], [-1]], 2)
    assert follow(tree, [0, 3, 0]).node == (0, 1)
    assert follow(tree, [1, 0, 0]).node == (0,)
    assert follow(tree, [0, 0, 0]).node == (0, 1, 2)


@pytest.mark.parametrize(
    "parent",
    [[], [0], [-1, 1], [-1, 2, 1], [-1, 0, 5], [-1, -1], [-1, 0, -2], [[-1]]],
    ids=str,
)
def test_malformed_trees_are_refused(parent: list[Any]) -> None:
    with pytest.raises(ValueError, match="parent"):
        validate(parent)
    if parent and isinstance(parent[0], int):
        column = np.array(parent, dtype=np.int32)
        with pytest.raises(ValueError, match="parent"):
            follow(DraftTree(column, column, column, column), [0] * len(parent))
