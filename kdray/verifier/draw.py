"""Draws the tokens of a step; a request whose logits are broken does not spoil the others'."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.kernels.ops import Ops, SamplingRows
from kdray.verifier.layout import StepLayout, sampling_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepDraw:
    """token [M] int32, 0 in the rows of broken requests; broken: requests by number in the plan."""

    token: Tensor
    broken: frozenset[int]


def draw(ops: Ops, logits: Tensor, layout: StepLayout) -> StepDraw:
    """The token of every drawn row; logits [M, V].

    A row's draw depends on that row alone, so drawing by request gives the same tokens. It is done
    only where a row without any finite logit was met, which costs a step that has none nothing.
    """
    rows = sampling_rows(layout)
    try:
        return StepDraw(token=ops.sample_tokens(logits, rows), broken=frozenset())
    except ValueError:
        return _draw_by_request(ops, logits, rows, layout.drawn_at[0])


def _draw_by_request(ops: Ops, logits: Tensor, rows: SamplingRows, owner: Tensor) -> StepDraw:
    """owner [M] int64: the request of each row; a request's rows stand together."""
    token = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    broken = []
    requests, counts = owner.unique_consecutive(return_counts=True)
    start = 0
    for request, count in zip(requests.tolist(), counts.tolist(), strict=True):
        own = slice(start, start + count)
        start += count
        try:
            token[own] = ops.sample_tokens(logits[own], _part(rows, own)).to(torch.int32)
        except ValueError:
            broken.append(request)
    return StepDraw(token=token, broken=frozenset(broken))


def _part(rows: SamplingRows, own: slice) -> SamplingRows:
    return SamplingRows(
        params=rows.params[own],
        seed=rows.seed[own],
        position=rows.position[own],
        history=rows.history[own],
        end_token_ids=rows.end_token_ids[own],
    )
