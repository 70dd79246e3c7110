"""A text through a target in passes that differ in nothing but the order of their sums.

Nothing of an engine is in it: no scheduler, no drafter, no commit. Every text has a cache of its
own, written in order, and masks made here from who stands above whom. What an engine gets wrong in
any of those this cannot get wrong with it. The model and its ops are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from layer_errors import routed_by
from other_router import OtherRouter
from plain_rows import PAGE, Part, chunk, round_rows, step_rows, tree
from torch import Tensor

from kdray.core.sampling import Float32Array
from kdray.kernels.latent_rows import RowFormat
from kdray.kernels.ops import LiveRows
from kdray.model.batch import ForwardBatch
from kdray.model.moe import Router, Routing
from kdray.model.target import TargetModel
from kdray.verifier.kv_cache import KVCache

TAIL = 24  # last tokens that run in pieces, where a shape has them
# One number of so many is nudged. On the demo in bfloat16 that moves logits as far as rounding has
# moved them from fp32 (of the 20 likeliest tokens, pairwise: 0.092 in the median, beside 0.096; all
# numbers nudged: 0.121): once any bit differs, everything behind it is rounded anew.
NUDGED = 64
BESIDE_ROWS = 7  # of a text that runs beside

Way = Literal["known", "tree", "round"]


class Shape(NamedTuple):
    """How the passes over a text are cut.

    rows     of the last pass, of which the text's last token is the last
    way      known: as a chunk of prompt; tree: as draft nodes with a wrong sibling each; round:
             the same as a device round lays them out
    piece    rows of each pass over the TAIL tokens before; None: all before in one pass
    beside   other texts in the last pass
    nudge    0, or which of the embedding's numbers are moved by a unit in their last place
    """

    rows: int
    way: Way = "known"
    piece: int | None = None
    beside: int = 0
    nudge: int = 0


class Passed(NamedTuple):
    """logits [V] behind the text; expert [layers with experts, tokens, k], in order of number;
    gap [layers, tokens]: of the last expert chosen to the first one left out, in router scores."""

    logits: Float32Array
    expert: Tensor
    gap: Tensor


class Watched(OtherRouter):
    """Routes as its router does, or to what it is told (-1: as the router does); keeps what it
    chose."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self.told: Tensor | None = None
        self.chosen = torch.empty(0, 0, dtype=torch.int64)
        self.gap = torch.empty(0)

    def choose(self, logits: Tensor, live: LiveRows | None = None) -> Routing:
        routing = super().choose(logits, live)
        if self.told is not None:
            routing = self._as_told(self.told.to(logits.device), logits, routing)
        self.chosen, self.gap = routing.expert.cpu(), self._gap(logits, routing.expert).cpu()
        return routing

    def _as_told(self, told: Tensor, logits: Tensor, own: Routing) -> Routing:
        """Other experts with the weights that this dtype gives them."""
        expert = torch.where(told < 0, own.expert, told)
        weight = torch.sigmoid(logits).gather(1, expert.clamp_min(0))
        if self.router.rule.normalize:
            weight = weight / weight.sum(-1, keepdim=True)
        weight = torch.where(told < 0, own.weight, weight * self.router.rule.scale)
        return Routing(expert, weight)

    def _gap(self, logits: Tensor, expert: Tensor) -> Tensor:
        """[T]; below 0 where another group's experts, which were not looked at, score higher."""
        score = torch.sigmoid(logits) + self.router.bias
        chosen = expert.clamp_min(0)
        last = score.gather(1, chosen).amin(1)
        return last - score.scatter(1, chosen, -torch.inf).amax(1)


@dataclass(frozen=True, eq=False)
class PlainPasses:
    """Of one model, its routers watched; experts of any kind.

    row          of the cache
    nudges_own   nudges move the text's own tokens alone: numbers for all of a large vocabulary
                 take seconds to draw
    """

    model: TargetModel
    row: RowFormat
    routers: tuple[Watched, ...]
    nudges_own: bool = False

    @classmethod
    def of(cls, model: TargetModel, row: RowFormat, *, nudges_own: bool = False) -> PlainPasses:
        routers: list[Watched] = []

        def watched(router: Router) -> Watched:
            routers.append(Watched(router))
            return routers[-1]

        model = routed_by(watched, model)
        return cls(model, row, tuple(routers), nudges_own)

    @torch.inference_mode()
    def run(self, text: Sequence[int], shape: Shape, told: Tensor | None = None) -> Passed:
        """told: experts as in Passed, which every token of the text then visits."""
        rows = min(shape.rows, len(text))
        pages = -(-(len(text) + 2 * rows) // PAGE)
        device = self.model.embedding.device
        caches = KVCache(
            num_layers=self.model.num_layers, num_pages=pages * (1 + shape.beside),
            page_size=PAGE, row=self.row, device=device,
        ).layers  # fmt: skip
        *before, last = _cuts(len(text), rows, shape.piece)
        passes = [([chunk(text, start, end)], step_rows) for start, end in before]
        passes.append((_last_parts(text, last[0], shape), lay_out_of(shape)))
        model = self.model
        if shape.nudge:
            own = sorted(set(text)) if self.nudges_own else None
            model = replace(model, embedding=nudged(model.embedding, shape.nudge, own))
        heard: list[tuple[Tensor, Tensor]] = []
        for parts, lay_out in passes:
            batch = lay_out(parts, pages, device)
            self._tell(told, parts[0], len(batch.token))
            hidden = model.forward(batch, caches).hidden
            heard.append(self._heard(parts[0].mine))
        for router in self.routers:
            router.told = None
        end = parts[0].mine[-1]
        logits = model.logits(hidden[end : end + 1])[0].cpu().numpy()
        expert, gap = (torch.cat(both, dim=1) for both in zip(*heard, strict=True))
        return Passed(logits, expert.sort(dim=-1).values, gap)

    def _tell(self, told: Tensor | None, part: Part, num_rows: int) -> None:
        for layer, router in enumerate(self.routers):
            if told is not None:
                own = told[layer, part.num_cached : part.num_cached + len(part.mine)]
                router.told = torch.full((num_rows, told.shape[2]), -1)
                router.told[part.mine] = own

    def _heard(self, mine: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(mine)
        chosen = torch.stack([router.chosen[rows] for router in self.routers])
        return chosen, torch.stack([router.gap[rows] for router in self.routers])


def nudged(embedding: Tensor, seed: int, tokens: Sequence[int] | None = None) -> Tensor:
    """One in NUDGED of its numbers, drawn by the seed, is the next one up or down in its dtype;
    of these tokens' alone, where some are given."""
    own = None if tokens is None else torch.tensor(tokens, device=embedding.device)
    numbers = embedding if own is None else embedding[own]
    moved = numbers.to("cpu", copy=True)  # so that a seed moves the same ones on every device
    dice = torch.Generator().manual_seed(seed)
    drawn = torch.randint(2 * NUDGED, moved.shape, generator=dice, dtype=torch.uint8)
    for number, bound in enumerate((torch.inf, -torch.inf)):
        at = drawn == number
        moved[at] = torch.nextafter(moved[at], torch.tensor(bound, dtype=moved.dtype))
    moved = moved.to(embedding.device)
    return moved if own is None else embedding.index_copy(0, own, moved)


def lay_out_of(shape: Shape) -> Callable[[Sequence[Part], int, torch.device], ForwardBatch]:
    return round_rows if shape.way == "round" else step_rows


def _last_parts(text: Sequence[int], start: int, shape: Shape) -> list[Part]:
    """The text's last rows, and beginnings of it beside them as texts of their own."""
    is_known = shape.way == "known"
    first = chunk(text, start, len(text)) if is_known else tree(text, start)
    most = BESIDE_ROWS if is_known else 1
    beside = [chunk(text, 0, min(len(text), 1 + i % most)) for i in range(shape.beside)]
    return [first, *beside]


def _cuts(length: int, rows: int, piece: int | None) -> list[tuple[int, int]]:
    """Where passes start and end."""
    last = length - rows
    tail = last if piece is None else max(0, last - TAIL)
    edges = [0, *range(tail, last, piece or 1), last, length]
    return [(start, end) for start, end in pairwise(edges) if start < end]
