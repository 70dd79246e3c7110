"""How far from another choice a model stood where two ways of decoding parted, in fp32 on the CPU.

Where the two tokens stood level, or one of them at the edge of what top-k, top-p or min-p leave,
sums in another order decide which is drawn. Anywhere else a way is wrong, or the dtype's rounding
has steps: an expert that is chosen narrowly gives way to another. How far rounding moves the logits
of the same text against one another is measured beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from traffic import Visit

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.core.sampling import (
    Float32Array,
    adjust_logits,
    divisor_of,
    drop_unlikely,
    gumbel_noise,
    temper,
)
from kdray.engine import resolve
from kdray.kernels.attention_batch import AttentionBatch
from kdray.kernels.ops import load_ops
from kdray.model.batch import ForwardBatch
from kdray.model.target import TargetModel

MOST_LIKELY = 20  # tokens whose logits are looked at


class Judge:
    """For targets of one dtype. near_tie: what a margin may be."""

    def __init__(self, config: EngineConfig) -> None:
        facts = resolve(config)
        self.dtype = facts.dtype
        # Logits reach some 40: sums in another order move them by a few units of their last place.
        self.near_tie = 2e-3 if facts.dtype == torch.float32 else 40 * 2.0**-8 * 4
        self._folder = facts.target
        self._model = TargetModel.load(facts.target, ops=load_ops("cpu"))

    def movement(self, texts: Sequence[tuple[Visit, Sequence[int]]]) -> Float32Array:
        """By how much the dtype moves logits, at every token of the replies: of the most likely
        ones, the one that rises most against the one that falls most."""
        rounded = TargetModel.load(self._folder, ops=load_ops("cpu"), dtype=self.dtype)
        found = []
        for visit, reply in texts:
            if reply:
                text, rows = [*visit.prompt, *reply[:-1]], len(reply)
                exact = _logits(self._model, text, rows)
                moved = _logits(rounded, text, rows) - exact
                likely = np.argsort(-exact, axis=1)[:, :MOST_LIKELY]
                found.append(np.ptp(np.take_along_axis(moved, likely, axis=1), axis=1))
        return np.concatenate(found)

    def margin(self, visit: Visit, mine: Sequence[int], other: Sequence[int]) -> float:
        """At the first difference; inf where one of the two ended early."""
        at = parted_at(mine, other)
        if at is None:
            return float("inf")
        logits = _logits(self._model, [*visit.prompt, *mine[:at]], 1)[0]
        return max(needs_at(logits, visit, mine[:at], (mine[at], other[at])))


def parted_at(mine: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two replies differ first; None where one goes on as the other did."""
    shared = zip(mine, other, strict=False)
    return next((i for i, (a, b) in enumerate(shared) if a != b), None)


def needs_at(
    logits: Float32Array, visit: Visit, said: Sequence[int], pair: tuple[int, int]
) -> tuple[float, float]:
    """needs_of behind a visit's prompt and what it was answered so far; logits [V] of a model."""
    adjusted = adjust_logits(logits, visit.sampling, (visit.prompt, said))
    return needs_of(adjusted, visit.sampling, len(visit.prompt) + len(said), pair)


@torch.inference_mode()
def _logits(model: TargetModel, text: Sequence[int], rows: int) -> Float32Array:
    """Of the last tokens of a text: [rows, V]."""
    count = len(text)
    place = torch.arange(count)
    attention = AttentionBatch(
        row_start=(0, count), num_cached=(0,), num_known=(count,),
        page_table=torch.zeros(1, 1, dtype=torch.int32), page_size=count,
        mask=torch.ones(1, 1, 1, dtype=torch.int32),
    )  # fmt: skip
    batch = ForwardBatch(token=torch.tensor(text), position=place, slot=place, attention=attention)
    dtype = model.embedding.dtype
    caches = [torch.zeros(count, model.kv_width, dtype=dtype) for _ in range(model.num_layers)]
    logits: Float32Array = model.logits(model.forward(batch, caches).hidden[-rows:]).numpy()
    return logits


def margin_of(
    logits: Float32Array, params: SamplingParams, position: int, pair: tuple[int, int]
) -> float:
    """What logits [V], adjusted, must at least move by, against one another, for either of two
    tokens to be the one drawn at `position`."""
    return max(needs_of(logits, params, position, pair))


def needs_of(
    logits: Float32Array, params: SamplingParams, position: int, pair: tuple[int, int]
) -> tuple[float, float]:
    """The same for each of the two: 0 for the one that is drawn before the other as it is.

    One token is drawn before the other if it is kept, and the other is behind it or dropped.
    """
    a, b = pair
    if params.temperature == 0:
        ahead = float(logits[a] - logits[b])
        return max(0.0, -ahead), max(0.0, ahead)
    assert params.seed is not None
    tempered = temper(logits, params.temperature)
    value = tempered + gumbel_noise([params.seed], [position], len(logits))[0]
    kept = {token: slack(tempered, params, token) for token in pair}
    ahead = float(value[a] - value[b])
    need_a = max(0.0, -kept[a], min(-ahead, kept[b])) * divisor_of(params)
    return need_a, max(0.0, -kept[b], min(ahead, kept[a])) * divisor_of(params)


def slack(tempered: Float32Array, params: SamplingParams, token: int) -> float:
    """By how much a token is inside what the filters keep of tempered logits [V]; below 0: outside.

    In units of tempered logits: of the last token kept or the first one dropped, of the log-odds of
    the probability before it (top-p), of the best token (min-p).
    """
    own = float(tempered[token])
    found = [float("inf")]
    if params.min_p > 0:
        found.append(own - float(np.log(params.min_p)))
    if params.top_k or params.top_p < 1:
        cut = SamplingParams(top_k=params.top_k, top_p=params.top_p)
        is_kept = np.isfinite(drop_unlikely(tempered, cut))
        next_one = float(tempered[~is_kept].max(initial=-np.inf))
        last = float(tempered[is_kept].min())
        edges = [own - (next_one if is_kept[token] else last)]
        if params.top_p < 1:
            edges.append(_mass_slack(tempered, cut, token))
        found.append(min(edges) if is_kept[token] else min(0.0, max(edges)))
    return min(found)


def _mass_slack(tempered: Float32Array, params: SamplingParams, token: int) -> float:
    """log-odds of top_p over those of what comes before the token among the top k."""
    order = np.argsort(-tempered, kind="stable")[: params.top_k or None]
    weight = np.exp(tempered[order].astype(np.float64))
    above = weight[tempered[order] > tempered[token]].sum() / weight.sum()
    if above == 0:
        return float("inf")
    if above >= 1:
        return -float("inf")
    top_p = params.top_p
    return float(np.log(top_p / (1 - top_p)) - np.log(above / (1 - above)))
