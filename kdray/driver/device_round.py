"""The round that never asks the host: five verbs from device state to device state.

A round of R requests by N nodes reads and writes fixed tensors, so on a GPU it is captured once as
a CUDA graph and replayed. Tree, chain and plain decoding are the same graph: they differ by budgets
and by how many of the candidates count.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdray.core.plan import (
    AcceptedPaths,
    Candidates,
    DeviceVerified,
    DeviceVerifierGroup,
    DraftTrees,
    RunningRows,
)
from kdray.core.tree import ABSENT
from kdray.driver.running import RunningState
from kdray.kernels.graphs import record
from kdray.kernels.round_ops import PlacedTrees, RoundOps
from kdray.model.drafter import DeviceDrafter

LENGTH, BONUS, DEAD, NUM_NODES = range(4)  # columns of a report; the path's drafts follow
FIRST_DRAFT = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundParts:
    """Who does what in a round; drafter None: plain decoding.

    stage   around each verb, by its name: for who measures
    """

    drafter: DeviceDrafter | None
    verifiers: DeviceVerifierGroup
    ops: RoundOps
    state: RunningState
    depth: int
    stage: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()


class DeviceRound:
    """R requests by N nodes.

    inputs   [3, R] int32, written before a run: the requests' slots (below 0: padding), the draft
             nodes wanted, and the candidates a depth that count
    report   [R, 4 + L] int32, written by a run: accept length, bonus token, whether a row without
             finite logits was met, nodes of the tree, then the drafts on the path
    """

    def __init__(self, parts: RoundParts, requests: int, num_nodes: int) -> None:
        device = parts.state.slots.root.device
        self.requests = requests
        self.num_nodes = num_nodes
        self.inputs = torch.zeros(3, requests, dtype=torch.int32, device=device)
        self.inputs[0] = -1
        self.report = torch.zeros(
            requests, FIRST_DRAFT + parts.depth, dtype=torch.int32, device=device
        )
        self._parts = parts
        self._replay: Callable[[], None] | None = None

    def run(self) -> None:
        """Enqueue the round; nothing is waited for."""
        (self._replay or self.round)()

    def capture(self, pool: Any) -> None:
        """Record the round as a CUDA graph. Both runs before it are of padding alone."""
        self._replay = record(self.round, pool)

    @torch.inference_mode()
    def round(self) -> None:
        """Draft, build, verify, accept, commit."""
        parts, (slot, budgets, width) = self._parts, self.inputs
        rows = parts.state.rows(slot)
        with parts.stage("draft"):
            candidates = self._propose(rows, width)
        with parts.stage("build"):
            placed = parts.ops.build_trees(
                candidates, rows.root, budgets, rows.root_position, self.num_nodes
            )
        with parts.stage("verify"):
            verified = parts.verifiers.verify_on_device(placed.trees, placed.position, rows)
        with parts.stage("accept"):
            paths = parts.ops.accept_paths(placed.trees, verified.token, parts.depth)
        with parts.stage("commit"):
            parts.verifiers.commit_on_device(paths, rows)
            self._extend(rows, paths, verified)
            parts.ops.advance_requests(parts.state.slots, paths, slot)
            self._write_report(placed, verified, paths)

    def _propose(self, rows: RunningRows, width: Tensor) -> Candidates:
        drafter = self._parts.drafter
        if drafter is None or self.num_nodes == 1:
            empty = rows.root.new_zeros(len(rows.root), 0, 0)
            return Candidates(token=empty, score=empty)
        candidates = drafter.propose_on_device(rows.root, rows.root_position, rows.page_table)
        rank = torch.arange(candidates.score.shape[2], device=width.device, dtype=torch.int32)
        beyond = rank >= width[:, None, None]
        return Candidates(
            token=candidates.token, score=candidates.score.masked_fill(beyond, ABSENT)
        )

    def _extend(self, rows: RunningRows, paths: AcceptedPaths, verified: DeviceVerified) -> None:
        drafter = self._parts.drafter
        if drafter is not None:
            drafter.extend_on_device(paths, verified.features, rows.root_position, rows.page_table)

    def _write_report(
        self, placed: PlacedTrees, verified: DeviceVerified, paths: AcceptedPaths
    ) -> None:
        report, trees = self.report, placed.trees
        report[:, LENGTH] = paths.length
        report[:, BONUS] = paths.bonus
        report[:, DEAD] = _any_dead(verified.dead, trees)
        report[:, NUM_NODES] = trees.num_nodes
        report[:, FIRST_DRAFT:] = trees.token.gather(1, paths.node[:, 1:].long())


def _any_dead(dead: Tensor, trees: DraftTrees) -> Tensor:
    node = torch.arange(dead.shape[1], device=dead.device)
    met: Tensor = (dead != 0) & (node < trees.num_nodes[:, None])
    return met.any(dim=1)
