from __future__ import annotations

import pytest

from kdray.core.budget import Speculation

MANY = 1000


def test_each_mode_drafts_what_it_says() -> None:
    sizes = {"budget": 16, "depth": 7, "candidates": 8}
    tree, chain, plain = (Speculation(mode=m, **sizes) for m in ("tree", "chain", "plain"))
    assert (tree.candidates_kept, tree.draft_nodes(MANY)) == (8, 16)
    assert (chain.candidates_kept, chain.draft_nodes(MANY)) == (1, 7)
    assert (plain.candidates_kept, plain.draft_nodes(MANY)) == (0, 0)


def test_a_chain_stays_within_a_small_budget() -> None:
    assert Speculation(mode="chain", budget=3, depth=7, candidates=8).draft_nodes(MANY) == 3


def test_nothing_is_drafted_without_depth_or_budget() -> None:
    assert Speculation(mode="tree", budget=16, depth=0, candidates=8).draft_nodes(MANY) == 0
    assert Speculation(mode="tree", budget=0, depth=7, candidates=8).draft_nodes(MANY) == 0


@pytest.mark.parametrize(("tokens_left", "nodes"), [(0, 0), (1, 0), (2, 3), (3, 12), (4, 20)])
def test_no_node_is_deeper_than_the_tokens_left(tokens_left: int, nodes: int) -> None:
    speculation = Speculation(mode="tree", budget=20, depth=7, candidates=3)
    assert speculation.draft_nodes(tokens_left) == nodes
