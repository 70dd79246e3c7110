"""Why two ways of decoding parted where an exact model sees the two tokens far from one another.

The text they shared is run again in the dtype and on the device of the run, in many passes that
differ in nothing but the order of their sums, or in the last place of a few of their inputs
(plain_passes), and in each it is counted what either token lacks to be drawn. Where for each of
the two some pass draws it, or nearly (a slack away), rounding alone moves this very pair at this
very place so far: the parting has its cause. The passes are then repeated with every token visiting
the experts that the exact model chooses for it. If they no longer reach both tokens, it took other
experts, which a narrow choice lets rounding decide.

What is compared with is no engine: whole texts in caches of their own, without scheduler, drafter,
pages that move or commit. A token that a wrong mask, cache, position or draw in an engine gives is
one that no such pass comes near, and stays unexplained, unless the fault moves this pair no further
than rounding does. What the passes share with the engine, the model and its ops, cannot be found
wrong here: the tests of every op do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from judge import needs_at, parted_at
from plain_passes import Passed, PlainPasses, Shape
from traffic import Visit

from kdray.config import EngineConfig
from kdray.engine import resolve
from kdray.kernels.latent_rows import RowFormat
from kdray.kernels.ops import load_ops
from kdray.model.target import TargetModel

Needs = tuple[float, float]  # what either of two tokens lacks to be drawn (judge.needs_of)

WHOLE = Shape(rows=1 << 20)
ORDERS = (
    WHOLE, Shape(1), Shape(2), Shape(5), Shape(8), Shape(17), Shape(40, beside=6),
    Shape(1, beside=31), Shape(2, "tree"), Shape(5, "tree"), Shape(9, "tree", beside=3),
    Shape(1, "round"), Shape(2, "round"), Shape(4, "round", beside=1), Shape(6, "round", beside=3),
    Shape(1, "round", beside=7), Shape(3, "round", beside=15), Shape(9, "round"),
    Shape(1, piece=1), Shape(3, "round", piece=3, beside=3), Shape(2, "tree", piece=7),
    Shape(5, "round", piece=5),
)  # fmt: skip
NUDGED = (WHOLE, Shape(2, "round"), Shape(5, "tree"))  # by turns, each with a nudge of its own
MOST_PLACES = 40  # that are looked into
LEAST = len(ORDERS) + 12  # passes over any text
# As many as this while a token is out of reach: what one pass in 25 does must be met.
SHAPES = ORDERS + tuple(NUDGED[n % 3]._replace(nudge=n) for n in range(1, 241))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Of one parting. A lead is what the first token is ahead by, below 0 where the other is.

    at, tokens        where the replies parted, and the tokens of the text before
    margin            what the exact model's logits must move by for either token to be drawn
    exact             the exact model's lead
    lowest, highest   the leads of the dtype's passes
    passes, reaching  how many there were, and how many reach the token that fewer reach
    lacking           what the token that lacks more lacks in the pass that comes nearest to it
    lacking_orders    the same of the passes whose inputs are as they are
    lacking_told      the same with the exact model's experts
    flips             places (layer and token) at which the passes of the lowest and of the highest
                      lead have other experts
    first             of these the first, in the lowest layer: layer, token, the exact router's gap
    gaps              the narrowest of the exact router's gaps in each layer with experts
    ends              the passes of the lowest and of the highest lead
    """

    pair: tuple[int, int]
    at: int
    tokens: int
    margin: float
    exact: float
    lowest: float
    highest: float
    passes: int
    reaching: int
    lacking: float
    lacking_orders: float
    lacking_told: float
    flips: int
    first: tuple[int, int, float] | None
    gaps: dict[int, float]
    ends: tuple[Passed, Passed]

    def verdict(self, slack: float) -> str:
        if not self.lacking <= slack:
            return "unexplained"
        return "rounding" if self.lacking_told <= slack else "experts"

    def figures(self) -> dict[str, float]:
        found = {
            "tokens": float(self.tokens),
            "margin": self.margin,
            "lead_exact": self.exact,
            "lead_lowest": self.lowest,
            "lead_highest": self.highest,
            "passes": float(self.passes),
            "passes_reaching": float(self.reaching),
            "lacking": self.lacking,
            "lacking_by_order": self.lacking_orders,
            "lacking_with_exact_experts": self.lacking_told,
            "flips": float(self.flips),
        }
        if self.first is not None:
            found |= zip(("first_layer", "first_token", "first_gap"), self.first, strict=True)
        return found | {f"gap_{layer}": gap for layer, gap in self.gaps.items()}


class Causes:
    """Finds them, for one target.

    passes, exact   the target in the dtype and on the device of the run, and in fp32
    slack           what a token may lack in a pass that counts as reaching it
    """

    def __init__(self, passes: PlainPasses, exact: PlainPasses, slack: float) -> None:
        self.slack = slack
        self.passes = passes
        self.exact = exact
        self._dense = sum(not hasattr(layer.mlp, "router") for layer in exact.model.layers)
        self._known: dict[tuple[Visit, tuple[int, ...], frozenset[int]], Cause] = {}

    @classmethod
    def of_config(cls, config: EngineConfig, slack: float) -> Causes:
        """Loads the target as the config runs it, and as fp32 on the CPU."""
        facts = resolve(config)
        model = TargetModel.load(
            facts.target, ops=load_ops(facts.device), dtype=facts.dtype, device=facts.device,
            norm_eps_qkv=config.norm_eps_qkv,
        )  # fmt: skip
        exact = TargetModel.load(
            facts.target, ops=load_ops("cpu"), norm_eps_qkv=config.norm_eps_qkv
        )
        return cls(PlainPasses.of(model, facts.kv_row), exact_passes(exact), slack)

    def of(self, visit: Visit, mine: Sequence[int], other: Sequence[int]) -> Cause | None:
        """None where one reply ended early, which no pass explains, and behind MOST_PLACES: an
        engine that parts so often is looked into otherwise."""
        at = parted_at(mine, other)
        if at is None:
            return None
        key = (visit, tuple(mine[:at]), frozenset((mine[at], other[at])))
        if key not in self._known:
            if len(self._known) == MOST_PLACES:
                return None
            self._known[key] = self._find(visit, mine[:at], (mine[at], other[at]))
        return self._known[key]

    def _find(self, visit: Visit, said: Sequence[int], pair: tuple[int, int]) -> Cause:
        text = [*visit.prompt, *said]
        exact = self.exact.run(text, WHOLE)

        def needs(run: Passed) -> Needs:
            return needs_at(run.logits, visit, said, pair)

        passed: list[Passed] = []
        found: list[Needs] = []
        for shape in SHAPES:
            if len(found) >= LEAST and lacking(found) <= self.slack:
                break
            passed.append(self.passes.run(text, shape))
            found.append(needs(passed[-1]))
        is_reached = lacking(found) <= self.slack
        told = [
            needs(self.passes.run(text, shape, exact.expert))
            for shape in SHAPES[: len(found) if is_reached else LEAST]
            if shape.piece is None
        ]
        leads = [lead(need) for need in found]
        lowest, highest = (passed[leads.index(end(leads))] for end in (min, max))
        flips = (lowest.expert != highest.expert).any(-1).nonzero().tolist()
        first = None
        if flips:
            layer, token = flips[0]
            first = (self._dense + layer, token, float(exact.gap[layer, token]))
        return Cause(
            pair=pair,
            at=len(said),
            tokens=len(text),
            margin=max(needs(exact)),
            exact=lead(needs(exact)),
            lowest=min(leads),
            highest=max(leads),
            passes=len(found),
            reaching=min(sum(need[i] <= self.slack for need in found) for i in (0, 1)),
            lacking=lacking(found),
            lacking_orders=lacking(found[: len(ORDERS)]),
            lacking_told=lacking(told),
            flips=len(flips),
            first=first,
            gaps=dict(enumerate(exact.gap.amin(1).tolist(), start=self._dense)),
            ends=(lowest, highest),
        )


def exact_passes(exact: TargetModel) -> PlainPasses:
    """Of a model in fp32, its cache too."""
    sizes = exact.config
    row = RowFormat.of(sizes.kv_lora_rank, sizes.qk_rope_head_dim, torch.float32)
    return PlainPasses.of(exact, row)


def lead(needs: Needs) -> float:
    """Of the first token: what the other lacks, less what it lacks itself."""
    return needs[1] - needs[0]


def lacking(needs: Sequence[Needs]) -> float:
    """What the worse of two tokens lacks where it lacks least."""
    return max(min(need[0] for need in needs), min(need[1] for need in needs))
