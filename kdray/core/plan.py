"""All that passes between the driver and the verifiers: one plan down, one result up.

Rows. A step runs, for every planned request, its known tokens without KV and behind them the
draft nodes of its tree. The last known token is the tree's root (node 0). So a prefill chunk is
many known tokens and no drafts, plain decoding one known token and no drafts, speculation one and
`budget` drafts. Row i of a request sits at cache position num_cached + i (its scratch place until
commit); a known token's position in the text is the same, a draft node's is the root's position
plus its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kdray.core.profile import ProfileOrder
from kdray.core.request import SamplingParams

Array = Any  # numpy.ndarray in core's own tests, torch.Tensor in the engine
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRequest:
    """One request's part in a step.

    slot         0 <= slot < max_requests; the request keeps it while it runs
    num_cached   tokens whose KV is stored
    known        [m] int32, m >= 1: tokens at positions num_cached ..; the last one is the root
    budget       draft nodes wanted behind the root; 0 where m > 1 (prefill)
    pages        [P] int32 page table; covers num_cached + m + budget positions
    samples      False for a prompt chunk that is not the last: nothing is drawn
    seed         addresses the noise
    num_prompt   prompt tokens among the history (the rest is output)
    history      [num_cached + m] int32, all known tokens, where sampling.uses_history; else None
    """

    request_id: str
    slot: int
    num_cached: int
    known: Int32Array
    budget: int
    pages: Int32Array
    samples: bool
    sampling: SamplingParams
    seed: int
    num_prompt: int
    end_token_ids: frozenset[int] = frozenset()
    history: Int32Array | None = None

    @property
    def root_position(self) -> int:
        return self.num_cached + len(self.known) - 1

    def slots_at(self, position: Int64Array, page_size: int) -> Int64Array:
        """Cache slots of these positions, by the page table."""
        pages: Int64Array = self.pages[position // page_size].astype(np.int64)
        return pages * page_size + position % page_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What one step runs; row r of every batch array belongs to requests[r]."""

    step: int
    requests: tuple[PlannedRequest, ...]

    @property
    def max_budget(self) -> int:
        return max((request.budget for request in self.requests), default=0)

    @property
    def decodes(self) -> bool:
        """Whether any request is behind its prompt."""
        return any(r.samples and len(r.known) == 1 for r in self.requests)

    @property
    def prompts(self) -> bool:
        """Whether any request runs some of its prompt, or of what it had before a preemption."""
        return any(len(r.known) > 1 or not r.samples for r in self.requests)

    @property
    def roots(self) -> Int32Array:
        """[R]: the last known token of every request."""
        return np.array([request.known[-1] for request in self.requests], dtype=np.int32)

    def row_start(self, num_nodes: Sequence[int]) -> list[int]:
        """R + 1 offsets: known rows, then draft rows, request after request."""
        starts = [0]
        for request, nodes in zip(self.requests, num_nodes, strict=True):
            starts.append(starts[-1] + len(request.known) + nodes - 1)
        return starts


def page_table(requests: Sequence[PlannedRequest]) -> Int32Array:
    """[R, P]; behind a request's pages stands page 0."""
    table = np.zeros((len(requests), max(len(r.pages) for r in requests)), dtype=np.int32)
    for row, request in zip(table, requests, strict=True):
        row[: len(request.pages)] = request.pages
    return table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningRows:
    """R decoding requests whose state is kept on the device: a step of one root each.

    A row of padding stands at position 0 of a page that no request owns.

    slot                        [R] int32: where the state is kept; below 0: padding
    root, root_position         [R] int32: the token without KV and its place
    page_table                  [R, P] int32; page_size positions a page
    temperature                 [R] float32, 0: greedy      top_k   [R] int32, 0: all
    top_p, min_p                [R] float64                 seed    [R] int64
    """

    slot: Array
    root: Array
    root_position: Array
    page_table: Array
    page_size: int
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """The drafter's best tokens per depth, best first; absent ones carry score ABSENT (core.tree).

    token   [R, L, K] int32
    score   [R, L, K] int32, log-prob in fixed point (core.tree, the score contract)
    """

    token: Array
    score: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftTrees:
    """A batch of draft trees, padded to N nodes; entries at or beyond num_nodes[r] mean nothing.

    token, parent, depth, score   [R, N] int32; node 0 is the root, parent[0] = -1, parent[i] < i
    mask                          [R, N, ceil(N/32)] int32 words: bit j of row i is set where node j
                                  is node i or an ancestor of it
    num_nodes                     [R] int32, root counted
    """

    token: Array
    parent: Array
    depth: Array
    score: Array
    mask: Array
    num_nodes: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verified:
    """What the target says.

    token      [R, N] int32: the target's token after each node
    features   [T, F]: hidden states the drafter reads, a row per row of the step (known, then
               drafts, request after request); F = 0 where nobody reads them
    broken     requests (rows of token) that met a row without any finite logit: their tokens mean
               nothing
    """

    token: Array
    features: Array
    broken: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceVerified:
    """What the target says of R requests by N nodes, every row of them run.

    token      [R, N] int32: the target's token after each node; padding nodes' mean nothing
    dead       [R, N] int32: 1 where no logit of the row was finite
    features   [R, N, F]: hidden states the drafter reads
    """

    token: Array
    dead: Array
    features: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceptedPaths:
    """The accepted way through each tree.

    node     [R, D] int32: node numbers from the root on; entries from length[r] on mean nothing
    length   [R] int32: nodes on the path, root counted = the accept length of the step
    bonus    [R] int32: the target's token after the last node of the path; the next root
    """

    node: Array
    length: Array
    bonus: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """What one request gained: accepted draft tokens and the bonus token, in order.

    is_broken   a row without any finite logit was met: the tokens mean nothing
    """

    request_id: str
    tokens: tuple[int, ...]
    num_drafted: int
    is_broken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results in the plan's order. A prompt chunk that does not sample gains no token."""

    step: int
    requests: tuple[RequestResult, ...]


class VerifierGroup(Protocol):
    """All ranks of the target model as one object. Calls alternate: verify, commit, verify, ..

    A commit may be deferred and travel with the next verify; it takes effect before any KV of that
    next step is written.
    """

    def verify(self, plan: StepPlan, trees: DraftTrees) -> Verified: ...

    def commit(self, paths: AcceptedPaths) -> None: ...

    def profile(self, order: ProfileOrder | None) -> None:
        """The ranks beside the caller's own record from the next step on; None: no longer."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundOrder:
    """What the host says of a device round to ranks that are not its own.

    size     requests and nodes of the round's bucket
    slot     [R] int32: who takes part; below 0: a row of padding
    tables   slots whose page tables have changed since the last round, with the new ones
    """

    size: tuple[int, int]
    slot: Int32Array
    tables: tuple[tuple[int, Int32Array], ...]


class DeviceVerifierGroup(Protocol):
    """A group that also runs steps without the host: all it reads and writes lies on the device.

    Every round is ordered once; the two calls of a round alternate as in VerifierGroup, and may be
    captured in a CUDA graph.
    """

    def order_round(self, order: RoundOrder) -> None:
        """From the host, before the round that it speaks of is enqueued."""
        ...

    def verify_on_device(
        self, trees: DraftTrees, position: Array, rows: RunningRows
    ) -> DeviceVerified:
        """Run all N nodes of every row; position [R, N] int32 in the text, root included."""
        ...

    def commit_on_device(self, paths: AcceptedPaths, rows: RunningRows) -> None: ...
