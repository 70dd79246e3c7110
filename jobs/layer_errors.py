"""How far a model's layers are from a reference's on the same inputs, half by half.

Attention and MLP of every layer get the reference's residual stream, rounded to the model's dtype,
so that no error is carried on. Errors are those of what the half adds, over its own size (RMS over
all rows, and of the worst row), which is stricter than over the stream it is added to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from other_router import OtherRouter
from torch import Tensor

from kdray.core.tree import ancestor_mask
from kdray.kernels.attention_batch import AttentionBatch, DeviceAttentionBatch
from kdray.kernels.ops import LiveRows
from kdray.model.batch import ForwardBatch
from kdray.model.mla import AttentionSplit, Rows
from kdray.model.moe import DenseMLP, Routing
from kdray.model.parallel import SoloCollectives
from kdray.model.target import Layer, TargetModel

PAGE = 16
PAGES = 24  # of a request


class ErrorSize(NamedTuple):
    """relative    RMS of the difference over RMS of the reference
    worst_row   the same of the row where it is largest
    max_abs     of the difference
    """

    relative: float
    worst_row: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class Error:
    """layer: its number, or their count; part: attention, mlp, or head behind all layers.

    swapped       rows whose experts are not the reference's, which takes the same for the size
    swap_margin   how far one of these was at most from being one of the best, in scores
    """

    layer: int
    part: str
    rows: int
    size: ErrorSize
    swapped: int = 0
    swap_margin: float = 0.0


def size_of_error(found: Tensor, wanted: Tensor) -> ErrorSize:
    """Of [T, E]."""
    difference, wanted = found.float() - wanted.float(), wanted.float()
    squares, wanted_squares = difference.square().mean(1), wanted.square().mean(1)
    whole = (squares.mean() / wanted_squares.mean()).sqrt()
    worst = (squares / wanted_squares).max().sqrt()
    return ErrorSize(float(whole), float(worst), float(difference.abs().max()))


class LayerByLayer:
    """Two models with a cache each, which holds what the steps before have left."""

    def __init__(self, model: TargetModel, reference: TargetModel, requests: int) -> None:
        self._model, self._reference = model, reference
        self._caches, self._reference_caches = (caches_of(m, requests) for m in (model, reference))

    @torch.inference_mode()
    def compare(self, batch: ForwardBatch) -> Iterator[Error]:
        """Layer after layer, then the head."""
        model, reference = self._model, self._reference
        rows, wanted_rows = rows_of(model, batch), rows_of(reference, batch)
        x = model.embed(batch.token)
        count = len(x)
        for i, (layer, wanted_layer) in enumerate(zip(model.layers, reference.layers, strict=True)):
            found = attend(model, layer, x, rows, self._caches[i])
            wanted = attend(reference, wanted_layer, x.float(), wanted_rows,
                            self._reference_caches[i])  # fmt: skip
            yield Error(i, "attention", count, size_of_error(found, wanted))

            x, normed = model.ops.add_rms_norm(x, wanted.to(x.dtype), layer.mlp_norm)
            wanted_normed = reference.ops.rms_norm(x.float(), wanted_layer.mlp_norm)
            wanted, short = told_mlp(layer, normed, wanted_layer, wanted_normed)
            error = size_of_error(layer.mlp.partial(normed), wanted)
            swapped, margin = int((short > 0).sum()), float(short.max())
            yield Error(i, "mlp", count, error, swapped=swapped, swap_margin=margin)
            x = x + wanted.to(x.dtype)
        normed = model.ops.rms_norm(x, model.final_norm)
        wanted_normed = reference.ops.rms_norm(x.float(), reference.final_norm)
        error = size_of_error(model.logits(normed), reference.logits(wanted_normed))
        yield Error(len(model.layers), "head", count, error)


def attend(model: TargetModel, layer: Layer, x: Tensor, rows: Rows, cache: Tensor) -> Tensor:
    return layer.attention.partial(model.ops.rms_norm(x, layer.attention_norm), rows, cache)


def told_mlp(
    layer: Layer, x: Tensor, wanted_layer: Layer, wanted_x: Tensor
) -> tuple[Tensor, Tensor]:
    """The reference's MLP [T, E] by the experts that the model chooses; and, [T], by how far the
    least of these misses the reference's choice, or 0."""
    if isinstance(layer.mlp, DenseMLP) or isinstance(wanted_layer.mlp, DenseMLP):
        return wanted_layer.mlp.partial(wanted_x), torch.zeros(len(x), device=x.device)
    expert = layer.mlp.router.route(x).expert
    router = wanted_layer.mlp.router
    choice = torch.sigmoid(wanted_x @ router.weight) + router.bias
    least = choice.topk(expert.shape[1], dim=1).values.amin(1)
    short = (least - choice.gather(1, expert).amin(1)).clamp_min(0)
    told = _with(wanted_layer.mlp, partial(Told, chosen=[expert]))
    return told.partial(wanted_x), short


class Heard(OtherRouter):
    """Notes what experts its router chose, layer after layer."""

    def __init__(self, router: Any, chosen: list[Tensor]) -> None:
        super().__init__(router)
        self.chosen = chosen

    def choose(self, logits: Tensor, live: LiveRows | None = None) -> Routing:
        routing = super().choose(logits, live)
        self.chosen.append(routing.expert)
        return routing


class Told(OtherRouter):
    """Takes the experts another one chose, and gives them its router's weights."""

    def __init__(self, router: Any, chosen: list[Tensor]) -> None:
        super().__init__(router)
        self.chosen = chosen

    def choose(self, logits: Tensor, live: LiveRows | None = None) -> Routing:
        expert, rule = self.chosen.pop(0), self.router.rule
        weight = torch.sigmoid(logits).gather(1, expert)
        if rule.normalize:
            weight = weight / weight.sum(1, keepdim=True)
        return Routing(expert, weight * rule.scale)


class Passes:
    """Forward passes of a model, one behind the other, that keep what experts were chosen."""

    def __init__(self, model: TargetModel, requests: int) -> None:
        self.chosen: list[Tensor] = []
        self._model = routed_by(partial(Heard, chosen=self.chosen), model)
        self._caches = caches_of(model, requests)

    @torch.inference_mode()
    def logits(self, batch: ForwardBatch, rows: Tensor | slice = slice(None)) -> Tensor:
        """[M, V] of some rows of a batch."""
        hidden = self._model.forward(batch, self._caches).hidden
        return self._model.logits(hidden[rows])


class ToldPasses(Passes):
    """The same passes of another model, by the experts that were chosen then."""

    def __init__(self, model: TargetModel, requests: int, chosen: list[Tensor]) -> None:
        """chosen: of passes made or to be made, in their order; it is used up."""
        super().__init__(routed_by(partial(Told, chosen=chosen), model), requests)


class BlurredPasses(ToldPasses):
    """Told passes whose every half is off at random: what errors of that size do to logits.

    Softmax, routing weights and sums that cancel carry an error on larger than it was, by as much
    as the weights and the text want; so that is measured and not derived.
    """

    def __init__(
        self,
        model: TargetModel,
        requests: int,
        chosen: list[Tensor],
        sizes: tuple[float, float],
        seed: int,
    ) -> None:
        """sizes: of attention's errors and MLP's, over the RMS of the row that is off."""
        blur = Blur(sizes, torch.Generator(model.embedding.device).manual_seed(seed))
        super().__init__(replace(model, collectives=blur), requests, chosen)


class Blur(SoloCollectives):
    """Of a rank that is alone: attention's results and the MLP's pass here, in turns."""

    def __init__(self, sizes: tuple[float, float], generator: torch.Generator) -> None:
        self._sizes = cycle(sizes)
        self._generator = generator

    def all_reduce(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self._generator, device=x.device)
        size = next(self._sizes) * x.float().square().mean(1, keepdim=True).sqrt()
        return x + (size * noise).to(x.dtype)


def routed_by(make: Callable[[Any], Any], model: TargetModel) -> TargetModel:
    """Every layer's router in the hands of another."""
    layers = [
        layer if isinstance(layer.mlp, DenseMLP) else replace(layer, mlp=_with(layer.mlp, make))
        for layer in model.layers
    ]
    return replace(model, layers=tuple(layers))


def _with(mlp: Any, make: Callable[[Any], Any]) -> Any:
    router = make(mlp.router)
    return replace(mlp, router=router) if is_dataclass(mlp) else mlp._replace(router=router)


def rows_of(model: TargetModel, batch: ForwardBatch) -> Rows:
    return Rows(model.rope.turns(batch.position), batch.slot, AttentionSplit.of(batch.attention))


def caches_of(model: TargetModel, requests: int) -> list[Tensor]:
    """Room for so many requests of PAGES pages, in the dtype the model is in."""
    shape = (requests * PAGES * PAGE, model.kv_width)
    return [
        torch.zeros(shape, dtype=model.embedding.dtype, device=model.embedding.device)
        for _ in model.layers
    ]


def known_rows(
    texts: Sequence[Sequence[int]], device: torch.device, *, first: int = 0, pages: int = PAGES
) -> ForwardBatch:
    """Prompts from their beginning, of requests `first` on."""
    counts = [len(text) for text in texts]
    place = np.concatenate([np.arange(count) for count in counts])
    request = np.repeat(np.arange(first, first + len(texts)), counts)
    attention = AttentionBatch(
        row_start=(0, *(int(end) for end in np.cumsum(counts))),
        num_cached=(0,) * len(texts),
        num_known=tuple(counts),
        page_table=page_table(first, len(texts), pages).to(device),
        page_size=PAGE,
        mask=torch.ones(len(texts), 1, 1, dtype=torch.int32, device=device),
    )
    return ForwardBatch(
        token=torch.tensor([t for text in texts for t in text], device=device),
        position=torch.from_numpy(place).to(device),
        slot=torch.from_numpy(request * pages * PAGE + place).to(device),
        attention=attention,
    )


def tree_rows(
    tokens: Sequence[Sequence[int]],
    parent: Sequence[int],
    cached: Sequence[int],
    device: torch.device,
) -> ForwardBatch:
    """A tree a request, all of one shape, behind what is cached of requests 0 on: as in rounds."""
    requests, nodes = len(tokens), len(parent)
    depth = np.zeros(nodes, dtype=np.int64)
    for node, above in enumerate(parent[1:], start=1):
        depth[node] = depth[above] + 1
    root = np.array(cached)[:, None]
    mask = torch.from_numpy(ancestor_mask(parent).view(np.int32))
    table = page_table(0, requests, PAGES).to(device)
    attention = DeviceAttentionBatch(
        num_cached=torch.tensor(cached, dtype=torch.int32, device=device),
        num_nodes=torch.full((requests,), nodes, dtype=torch.int32, device=device),
        page_table=table,
        page_size=PAGE,
        mask=mask.expand(requests, -1, -1).contiguous().to(device),
    )
    slot = np.arange(requests)[:, None] * PAGES * PAGE + root + np.arange(nodes)
    return ForwardBatch(
        token=torch.tensor(tokens, device=device).flatten(),
        position=torch.from_numpy((root + depth).reshape(-1)).to(device),
        slot=torch.from_numpy(slot.reshape(-1)).to(device),
        attention=attention,
    )


def page_table(first: int, requests: int, pages: int) -> Tensor:
    table = torch.arange(first * pages, (first + requests) * pages, dtype=torch.int32)
    return table.view(requests, pages)
