"""Whether ways of decoding a target of full widths say the same, and where not, why.

Findings are rows of the results file, each with whether it is as it should be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from causes import WHOLE, Cause, Causes, exact_passes
from decode_ways import Decoded
from judge import needs_at, parted_at
from layer_errors import Passes, ToldPasses, known_rows
from plain_passes import PlainPasses
from traffic import Visit

from kdray.kernels.latent_rows import RowFormat
from kdray.model.target import TargetModel

# A near tie is twice the greatest of a million errors, and so some eight times an error's RMS: a
# sixteenth of it is half of that. It makes up for the step from the furthest of a few hundred
# passes to one more, and lets in no token that all of them leave out by more than their own grain.
SLACKS = 16  # in a near tie
Params = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Finding:
    params: Params
    metrics: dict[str, float]
    good: bool


class Parting(NamedTuple):
    """Of two replies to a request.

    at      tokens they share; margin: in the reference, told the experts of plain decoding; inf
            where one ended early
    cause   where one was looked for, and error: of any logit of its furthest passes, from the
            reference told what experts each visits
    """

    request: int
    at: int
    margin: float
    cause: Cause | None = None
    error: float = math.inf

    def verdict(self, near_tie: float) -> str:
        """unexplained too where the passes that would explain it are themselves further off than
        rounding has been seen to be: an op that is wrong in some shapes explains nothing."""
        if self.margin <= near_tie:
            return "near tie"
        if self.cause is None or not self.error <= near_tie:
            return "unexplained"
        return self.cause.verdict(near_tie / SLACKS)

    def finding(self, ways: Params, near_tie: float) -> Finding:
        verdict = self.verdict(near_tie)
        params: Params = {**ways, "request": self.request, "verdict": verdict}
        figures = {} if self.cause is None else self.cause.figures() | {"error": self.error}
        metrics = {**figures, "position": float(self.at), "margin": self.margin}
        return Finding(params, metrics, verdict != "unexplained")


def way_finding(name: str, way: Decoded) -> Finding:
    tokens = sum(len(reply.token_ids) for reply in way.replies)
    metrics = {"tokens": float(tokens), "accept_length": way.accept_length, "s": way.seconds}
    return Finding({"way": name}, metrics, tokens > 0)


class Judge:
    """Knows the reference's logits behind every token of what plain decoding said.

    near_tie   twice the greatest difference of any logit from the reference's: either of two
               tokens may be off by that, in opposite directions

    The reference is told what experts plain decoding visits. Another way may visit others, where
    the choice is narrow, and so part from it anywhere: further apart than a near tie, causes.py
    looks whether this model's passes over the same text do too.
    """

    def __init__(
        self,
        model: TargetModel,
        reference: TargetModel,
        row: RowFormat,
        visits: list[Visit],
        plain: Decoded,
        error: float,
    ) -> None:
        """row: of the model's cache; error: the greatest difference found elsewhere."""
        self._visits = visits
        self._plain = [reply.token_ids for reply in plain.replies]
        texts = [[*v.prompt, *said[:-1]] for v, said in zip(visits, self._plain, strict=True)]
        batch = known_rows(texts, model.embedding.device)
        ends = np.cumsum([len(text) for text in texts])
        told = [np.arange(e - len(s), e) for e, s in zip(ends, self._plain, strict=True)]
        rows = torch.from_numpy(np.concatenate(told)).to(model.embedding.device)
        passes = Passes(model, len(texts))
        found = passes.logits(batch, rows)
        wanted = ToldPasses(reference, len(texts), passes.chosen).logits(batch, rows)
        self.near_tie = 2 * max(error, float((found - wanted).abs().max()))
        self._logits = wanted.split([len(said) for said in self._plain])
        self._causes = Causes(
            PlainPasses.of(model, row, nudges_own=True),
            exact_passes(reference),
            self.near_tie / SLACKS,
        )

    def against_reference(self) -> Finding:
        """Greedy tokens of plain decoding, which should be the reference's best."""
        margins = [
            float(row.max() - row[token])
            for visit, said, logits in zip(self._visits, self._plain, self._logits, strict=True)
            if visit.sampling.temperature == 0
            for token, row in zip(said, logits, strict=True)
            if int(row.argmax()) != token
        ]
        ways: Params = {"one": "plain, 1 rank", "other": "reference, greedy"}
        return self._finding(ways, margins, max(margins, default=0.0) <= self.near_tie)

    def against_plain(self, name: str, way: Decoded) -> Iterator[Finding]:
        """Only where two replies part: behind that they have different texts. One of all, and one
        of every parting that is no near tie."""
        ways: Params = {"one": name, "other": "plain, 1 rank"}
        replies = (reply.token_ids for reply in way.replies)
        partings = [
            self._parting(n, mine)
            for n, (mine, plainly) in enumerate(zip(replies, self._plain, strict=True))
            if mine != plainly
        ]
        far = [p.finding(ways, self.near_tie) for p in partings if p.margin > self.near_tie]
        is_good = all(finding.good for finding in far)
        yield self._finding(ways, [parting.margin for parting in partings], is_good)
        yield from far

    def _parting(self, n: int, mine: Sequence[int]) -> Parting:
        """Margins are in logits, noise included by the temperature that both are divided by."""
        visit, other = self._visits[n], self._plain[n]
        at = parted_at(mine, other)
        if at is None:
            return Parting(n, min(len(mine), len(other)), math.inf)
        logits = self._logits[n][at].cpu().numpy()
        margin = max(needs_at(logits, visit, mine[:at], (mine[at], other[at])))
        if margin <= self.near_tie:
            return Parting(n, at, margin)
        cause = self._causes.of(visit, mine, other)
        error = math.inf if cause is None else self._error(cause, [*visit.prompt, *mine[:at]])
        return Parting(n, at, margin, cause, error)

    def _error(self, cause: Cause, text: Sequence[int]) -> float:
        return max(
            float(np.abs(end.logits - self._causes.exact.run(text, WHOLE, end.expert).logits).max())
            for end in cause.ends
        )

    def _finding(self, ways: Params, margins: Sequence[float], is_good: bool) -> Finding:
        metrics = {
            "requests": float(len(self._visits)),
            "differing": float(len(margins)),
            "greatest_margin": max(margins, default=0.0),
            "near_tie": self.near_tie,
        }
        return Finding(ways, metrics, is_good)
