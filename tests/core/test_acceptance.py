"""What a drafter is assumed to hit: chances, scores, and the gain of chains and trees."""

from __future__ import annotations

import numpy as np
import pytest

from kdray.core.acceptance import AcceptanceProfile
from kdray.core.tree import FRACTION_BITS, MIN_LOGPROB


def profile(
    *hits: float, siblings: tuple[float, ...] = (), off_path: float = 0.0, depth: int | None = None
) -> AcceptanceProfile:
    return AcceptanceProfile.of(hits, siblings, off_path, depth or len(hits))


def test_the_last_hit_rate_holds_for_all_depths_behind_it() -> None:
    found = profile(0.8, 0.6, siblings=(0.5,), depth=4)
    wanted = [[0.8, 0.1], [0.6, 0.2], [0.6, 0.2], [0.6, 0.2]]
    assert found.marginals == pytest.approx(np.array(wanted))
    assert profile(0.8, 0.6, 0.4, depth=1).marginals == pytest.approx(np.array([[0.8]]))


def test_behind_a_sibling_all_shrink_alike() -> None:
    found = profile(0.8, siblings=(0.5,), off_path=0.2)
    assert found.behind_siblings == pytest.approx(np.array([[0.2, 0.025]]))
    assert profile(0.0, off_path=0.0).behind_siblings == pytest.approx(np.array([[0.0]]))


def test_scores_are_log_probs_in_fixed_point() -> None:
    scores = profile(0.5, 1.0, siblings=(0.5,)).scores()
    one = 1 << FRACTION_BITS
    assert scores.tolist() == [
        [round(np.log(0.5) * one), round(np.log(0.25) * one)],
        [0, int(MIN_LOGPROB * one)],
    ]


def test_a_chain_gains_what_its_hits_say() -> None:
    sure = profile(0.5, 0.5, 0.5)
    assert sure.length("plain", 1) == 1.0
    assert sure.length("chain", 4) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert sure.length("chain", 3) == pytest.approx(1 + 0.5 + 0.25)


def test_a_tree_gains_more_than_a_chain_by_its_siblings() -> None:
    assumed = profile(0.6, 0.6, siblings=(0.5,), off_path=0.2)
    # The chain, then the second token at depth 1 (0.2), and behind the first the second (0.12).
    assert assumed.length("tree", 5) == pytest.approx(1 + 0.6 + 0.36 + 0.2 + 0.12)
    # The chain behind the sibling comes next, and holds but off_path.
    assert assumed.length("tree", 6) == pytest.approx(1 + 0.6 + 0.36 + 0.2 + 0.12 + 0.2 * 0.2)


@pytest.mark.parametrize(
    ("hits", "siblings", "off_path", "message"),
    [
        ((), (), 0.0, "no hit rate"),
        ((1.2,), (), 0.0, "from 0 to 1"),
        ((0.5,), (-0.1,), 0.0, "from 0 to 1"),
        ((0.5,), (), 1.5, "from 0 to 1"),
        ((0.5,), (0.6, 0.6), 0.0, "more than all"),
        (
            (0.9, 0.2),
            (0.5,),
            0.0,
            r"depth 2 .* in 0\.2, 0\.4 .* smaller rates of siblings, or none",
        ),
        ((0.5,), (0.1, 0.2), 0.0, "likelier than the one before"),
        ((0.5, 0.3), (), 0.4, r"off_path, 0\.4, .* at most 0\.3"),
        ((float("nan"),), (), 0.0, "from 0 to 1"),
    ],
)
def test_chances_that_are_none_are_refused(
    hits: tuple[float, ...], siblings: tuple[float, ...], off_path: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AcceptanceProfile.of(hits, siblings, off_path, max(len(hits), 1))
