"""What a drafter is assumed to hit: the chance of every candidate, and what a tree gains by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kdray.core.budget import Mode
from kdray.core.tree import MIN_LOGPROB, DraftTree, Int32Array, build_tree, quantise

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceptanceProfile:
    """L depths, W candidates at each, best first.

    marginals   [L, W] float64: the chance that the target's token is the candidate, where all
                tokens before it were first candidates
    off_path    the chance of a first candidate where they were not; its siblings' shrink alike
    """

    marginals: Float64Array
    off_path: float

    @classmethod
    def of(
        cls, hits: Sequence[float], siblings: Sequence[float], off_path: float, depth: int
    ) -> AcceptanceProfile:
        """hits: of the first candidate, depth by depth, the last one for all depths behind it;
        siblings: of the second, third, .. where the first is wrong.

        Raises ValueError where the chances of a depth are not ones of candidates best first.
        """
        if not hits:
            raise ValueError("there is no hit rate")
        first = np.array([hits[min(d, len(hits) - 1)] for d in range(depth)], dtype=np.float64)
        rest = np.asarray(siblings, dtype=np.float64)
        marginals = np.column_stack([first, np.outer(1 - first, rest)])
        _check(marginals, first, off_path)
        return cls(marginals=marginals, off_path=off_path)

    @property
    def behind_siblings(self) -> Float64Array:
        """[L, W]: the chances where a token before was no first candidate."""
        first = self.marginals[:, :1]
        ratio = np.divide(self.off_path, first, out=np.zeros_like(first), where=first > 0)
        return self.marginals * ratio

    def scores(self) -> Int32Array:
        """[L, W]: the log-probs of a drafter that knows its chances, in fixed point; it drafts what
        has no chance as well, last."""
        return quantise(np.log(np.maximum(self.marginals, np.exp(MIN_LOGPROB))))

    def tree(self, nodes: int, width: int) -> DraftTree:
        """Of a drafter that knows its chances: `nodes`, the root counted, of `width` candidates a
        depth. A token is its rank among them."""
        score = self.scores()[:, :width]
        rank = np.broadcast_to(np.arange(score.shape[1], dtype=np.int32), score.shape)
        return build_tree(0, rank, score, nodes - 1)

    def length(self, mode: Mode, nodes: int) -> float:
        """Tokens that a step gains on average, the bonus token counted.

        1 + the sum over the tree's nodes of the chance that the target goes there.
        """
        if mode == "plain":
            return 1.0
        tree = self.tree(nodes, 1 if mode == "chain" else self.marginals.shape[1])
        chance, on_path = [1.0], [True]
        for node in range(1, tree.num_nodes):
            parent, depth = int(tree.parent[node]), int(tree.depth[node])
            rank = int(tree.token[node])
            chances = self.marginals if on_path[parent] else self.behind_siblings
            chance.append(chance[parent] * float(chances[depth - 1, rank]))
            on_path.append(on_path[parent] and rank == 0)
        return sum(chance)


def _check(marginals: Float64Array, first: Float64Array, off_path: float) -> None:
    for depth, chances in enumerate(marginals, start=1):
        shown = ", ".join(f"{chance:.3g}" for chance in chances)
        where = f"at depth {depth} the candidates hold in {shown} of all steps"
        if not ((chances >= 0) & (chances <= 1)).all():
            raise ValueError(f"{where}; a rate must be from 0 to 1")
        if chances.sum() > 1 + 1e-9:
            raise ValueError(f"{where}, more than all: give smaller rates of siblings, or none")
        if (np.diff(chances) > 0).any():
            raise ValueError(
                f"{where}, and none may be likelier than the one before it: give smaller rates of "
                "siblings, or none"
            )
    if not 0 <= off_path <= 1:
        raise ValueError(f"off_path must be from 0 to 1, got {off_path}")
    if (off_path > first).any():
        raise ValueError(
            f"off_path, {off_path:g}, is the smaller chance: at most {first.min():.3g}, the least "
            "of the hit rates"
        )
