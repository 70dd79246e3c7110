"""A plan and its trees, laid out as the flat rows of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.plan import DraftTrees, Int64Array, PlannedRequest, StepPlan, page_table
from kdray.kernels.attention_batch import AttentionBatch
from kdray.kernels.ops import SamplingRows
from kdray.kernels.page_tables import upload
from kdray.model.batch import ForwardBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class HostTrees:
    """The parts of a DraftTrees batch the layout needs, as host arrays."""

    token: NDArray[np.int32]
    parent: NDArray[np.int32]
    depth: NDArray[np.int32]
    num_nodes: tuple[int, ...]

    @classmethod
    def of(cls, trees: DraftTrees) -> HostTrees:
        return cls(
            token=trees.token.cpu().numpy(),
            parent=trees.parent.cpu().numpy(),
            depth=trees.depth.cpu().numpy(),
            num_nodes=tuple(trees.num_nodes.tolist()),
        )

    @classmethod
    def of_roots(cls, plan: StepPlan) -> HostTrees:
        """Of a plan without drafts, as the host knows them: reading them back would wait for the
        rounds in front, and their time is what a prompt's launches hide in."""
        roots = plan.roots[:, None]
        return cls(
            token=roots,
            parent=np.full_like(roots, -1),
            depth=np.zeros_like(roots),
            num_nodes=(1,) * len(roots),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLayout:
    """Where everything of a step sits.

    batch       the rows of the forward pass
    row_start   R + 1 offsets of the requests' rows
    drawn_rows  [M] int64: flat rows whose logits are drawn from, request after request
    drawn_at    ([M], [M]) int64: request and node of each of them
    """

    plan: StepPlan
    trees: HostTrees
    batch: ForwardBatch
    row_start: tuple[int, ...]
    drawn_rows: Tensor
    drawn_at: tuple[Tensor, Tensor]


def lay_out(plan: StepPlan, trees: DraftTrees, page_size: int, device: torch.device) -> StepLayout:
    """The rows of `plan` with `trees` [R, N] behind the known tokens (core.plan, Rows).

    Without drafts nothing waits for the device.
    """
    host = HostTrees.of(trees) if plan.max_budget else HostTrees.of_roots(plan)
    parts = [_rows_of(r, request, host, page_size) for r, request in enumerate(plan.requests)]
    tokens, positions, slots = (
        upload(np.concatenate(column), device) for column in zip(*parts, strict=True)
    )
    row_start = (0, *np.cumsum([len(part[0]) for part in parts]).tolist())
    rows, request_index, node_index = _drawn(plan, host, row_start)
    attention = AttentionBatch(
        row_start=row_start,
        num_cached=tuple(request.num_cached for request in plan.requests),
        num_known=tuple(len(request.known) for request in plan.requests),
        page_table=upload(page_table(plan.requests), device),
        page_size=page_size,
        mask=trees.mask,
    )
    return StepLayout(
        plan=plan,
        trees=host,
        batch=ForwardBatch(token=tokens, position=positions, slot=slots, attention=attention),
        row_start=row_start,
        drawn_rows=upload(rows, device),
        drawn_at=(torch.from_numpy(request_index), torch.from_numpy(node_index)),
    )


def sampling_rows(layout: StepLayout) -> SamplingRows:
    """How each drawn row is sampled, with its own path where penalties look back."""
    rows = list(zip(*(index.tolist() for index in layout.drawn_at), strict=True))
    requests = [layout.plan.requests[r] for r, _ in rows]
    depth = layout.trees.depth
    return SamplingRows(
        params=[request.sampling for request in requests],
        seed=[request.seed for request in requests],
        position=[layout.plan.requests[r].root_position + int(depth[r, i]) + 1 for r, i in rows],
        history=[_history(layout, r, i) for r, i in rows],
        end_token_ids=[request.end_token_ids for request in requests],
    )


def _rows_of(
    r: int, request: PlannedRequest, trees: HostTrees, page_size: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    num_drafts = trees.num_nodes[r] - 1
    num_known = len(request.known)
    drafts = slice(1, 1 + num_drafts)
    tokens = np.concatenate([request.known, trees.token[r, drafts]]).astype(np.int64)
    places = request.num_cached + np.arange(num_known + num_drafts, dtype=np.int64)
    positions = places.copy()
    positions[num_known:] = request.root_position + trees.depth[r, drafts]
    return tokens, positions, request.slots_at(places, page_size)


def _drawn(
    plan: StepPlan, trees: HostTrees, row_start: tuple[int, ...]
) -> tuple[Int64Array, Int64Array, Int64Array]:
    rows, request_index, node_index = [], [], []
    for r, request in enumerate(plan.requests):
        if not request.samples:
            continue
        nodes = np.arange(trees.num_nodes[r], dtype=np.int64)
        rows.append(row_start[r] + len(request.known) - 1 + nodes)
        request_index.append(np.full_like(nodes, r))
        node_index.append(nodes)
    empty = np.zeros(0, dtype=np.int64)
    return (
        np.concatenate([empty, *rows]),
        np.concatenate([empty, *request_index]),
        np.concatenate([empty, *node_index]),
    )


def _history(layout: StepLayout, r: int, node: int) -> tuple[list[int], list[int]] | None:
    request = layout.plan.requests[r]
    if request.history is None:
        return None
    path: list[int] = []
    while node > 0:
        path.append(int(layout.trees.token[r, node]))
        node = int(layout.trees.parent[r, node])
    known = request.history.tolist()
    return known[: request.num_prompt], known[request.num_prompt :] + path[::-1]
