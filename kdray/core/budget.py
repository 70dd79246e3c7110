"""How many draft nodes a request gets in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["tree", "chain", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How an engine speculates.

    mode         tree: the best prefixes; chain: the best token of every depth; plain: no drafts
    budget       most draft nodes per request and step, the root not counted
    depth        L, positions the drafter looks ahead
    candidates   K, tokens the drafter offers at every depth
    """

    mode: Mode
    budget: int
    depth: int
    candidates: int

    @property
    def candidates_kept(self) -> int:
        """Of the K candidates at a depth, those the tree builder sees: a chain is a tree of one."""
        kept: dict[Mode, int] = {"tree": self.candidates, "chain": 1, "plain": 0}
        return kept[self.mode]

    def draft_nodes(self, tokens_left: int) -> int:
        """Draft nodes for a request that may still gain `tokens_left` tokens.

        The bonus token is one of them, so drafts deeper than tokens_left - 1 would be in vain.
        """
        depth = min(self.depth, max(tokens_left - 1, 0))
        nodes, level = 0, 1
        for _ in range(depth):
            level *= self.candidates_kept
            nodes += level
            if level == 0 or nodes >= self.budget:
                break
        return min(self.budget, nodes)
