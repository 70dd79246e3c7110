"""Tensor-parallel ranks as one VerifierGroup: a header by ZeroMQ, the trees by broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kdray.core.plan import (
    AcceptedPaths,
    DeviceVerified,
    DraftTrees,
    RoundOrder,
    RunningRows,
    StepPlan,
    Verified,
)
from kdray.core.profile import ProfileOrder
from kdray.model.drafter import Drafter
from kdray.model.parallel import Collectives
from kdray.profiling.recorder import Recorder
from kdray.verifier.follower import FollowerRounds, pack_round
from kdray.verifier.verifier import Verifier
from kdray.verifier.wire import Kind, StepHeader, decode, encode


class HeaderSender(Protocol):
    """Rank 0's end of the control channel: every rank gets every message, in order."""

    def send(self, message: bytes) -> None: ...

    def close(self) -> None: ...


class HeaderReceiver(Protocol):
    """Another rank's end."""

    def receive(self) -> bytes: ...

    def close(self) -> None: ...


class RankGroup:
    """Rank 0's side. Holds its own verifier; tells the other ranks what to run beside it.

    A commit waits for the next step's header, so that a step costs one message; all ranks apply it
    before that step writes any KV. What a shared drafter learns of the step waits with it.
    """

    def __init__(self, verifier: Verifier, sender: HeaderSender, collectives: Collectives) -> None:
        self._verifier = verifier
        self._sender = sender
        self._collectives = collectives
        self._pending: AcceptedPaths | None = None
        self._behind: Callable[[], None] = lambda: None

    def order_draft(self, plan: StepPlan) -> None:
        """The other ranks draft for the plan, as the caller is about to."""
        self._send(StepHeader(kind=Kind.DRAFT, plan=plan))

    def behind_commit(self, call: Callable[[], None]) -> None:
        """call() once the pending commit has been applied, when the other ranks do the same."""
        self._behind = call

    def verify(self, plan: StepPlan, trees: DraftTrees) -> Verified:
        header = StepHeader(
            kind=Kind.STEP,
            plan=plan,
            num_nodes=trees.token.shape[1],
            num_words=trees.mask.shape[2],
        )
        self._send(header)
        self._collectives.broadcast(_pack_trees(trees))
        return self._verifier.verify(plan, trees)

    def _send(self, header: StepHeader) -> None:
        """A header, and behind it the commit that waited for it."""
        paths, self._pending = self._pending, None
        width = paths.node.shape[1] if paths is not None else 0
        self._sender.send(encode(replace(header, commit_width=width)))
        if paths is not None:
            self._collectives.broadcast(_pack_paths(paths))
            self._verifier.commit(paths)
            behind, self._behind = self._behind, lambda: None
            behind()

    def order_round(self, order: RoundOrder) -> None:
        self._send(StepHeader(kind=Kind.ROUND, plan=None, round=order))

    def verify_on_device(
        self, trees: DraftTrees, position: Tensor, rows: RunningRows
    ) -> DeviceVerified:
        self._collectives.broadcast(pack_round(trees, position, rows))
        return self._verifier.verify_on_device(trees, position, rows)

    def commit_on_device(self, paths: AcceptedPaths, rows: RunningRows) -> None:
        """All ranks have accepted the same paths."""
        self._verifier.commit_on_device(paths, rows)

    def commit(self, paths: AcceptedPaths) -> None:
        self._pending = paths

    def profile(self, order: ProfileOrder | None) -> None:
        """The other ranks record from the next step on; None: they record no longer."""
        kind = Kind.PROFILE_END if order is None else Kind.PROFILE
        self._sender.send(encode(StepHeader(kind=kind, plan=None, profile=order)))

    def close(self) -> None:
        self._sender.send(encode(StepHeader(kind=Kind.STOP, plan=None)))
        self._sender.close()


class _LastStep(NamedTuple):
    """What a commit is of, as Drafter.extend takes it."""

    plan: StepPlan
    features: Tensor
    row_start: Sequence[int]


_NO_STEP = _LastStep(StepPlan(step=0, requests=()), torch.zeros(0), ())


class RankWorker:
    """The side of every other rank: run() follows rank 0 until it says stop.

    beat   called around every message
    """

    def __init__(
        self,
        verifier: Verifier,
        receiver: HeaderReceiver,
        collectives: Collectives,
        device: torch.device,
        recorder: Recorder,
        beat: Callable[[], None] = lambda: None,
        rounds: FollowerRounds | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """rounds: for device rounds; None where rank 0 orders none.

        drafter: this rank's part of it; None where rank 0 drafts alone
        """
        self._verifier = verifier
        self._rounds = rounds
        self._drafter = drafter
        self._beat = beat
        self._recorder = recorder
        self._receiver = receiver
        self._collectives = collectives
        self._device = device
        self._last = _NO_STEP
        self.steps = 0

    def run(self) -> int:
        """Steps until STOP; returns how many. `steps` says so meanwhile, to any thread."""
        while True:
            self._beat()
            header = decode(self._receiver.receive())
            self._beat()
            if header.kind is Kind.STOP:
                self._receiver.close()
                self._recorder.end()
                self._recorder.join()
                return self.steps
            if header.kind is Kind.DRAFT:
                self._draft(header)
                continue
            if header.plan is not None:
                self._step(header.plan, header)
            elif header.round is not None:
                self._round(header.round, header)
            else:
                self._profile(header.profile)
                continue
            self.steps += 1

    def _profile(self, order: ProfileOrder | None) -> None:
        if order is None:
            self._recorder.end()
        else:
            self._recorder.begin(order)

    def _round(self, order: RoundOrder, header: StepHeader) -> None:
        assert self._rounds is not None, "rank 0 runs ahead, so all ranks must"
        self._commit(header)
        with self._recorder.range("verify"):
            self._rounds.run(order)

    def _commit(self, header: StepHeader) -> None:
        if not header.commits:
            return
        last, self._last = self._last, _NO_STEP
        with self._recorder.range("commit"):
            paths = _unpack_paths(self._receive((len(last.plan.requests), header.commit_width + 2)))
            self._verifier.commit(paths)
            if self._drafter is not None:
                self._drafter.extend(last.plan, paths, last.features, last.row_start)

    def _draft(self, header: StepHeader) -> None:
        assert self._drafter is not None and header.plan is not None, "rank 0 shares its drafter"
        self._commit(header)
        with self._recorder.range("draft"):
            self._drafter.propose(header.plan, torch.from_numpy(header.plan.roots))

    def _step(self, plan: StepPlan, header: StepHeader) -> None:
        self._commit(header)
        width = header.num_nodes * (3 + header.num_words) + 1
        with self._recorder.range("verify"):
            trees = _unpack_trees(self._receive((len(plan.requests), width)), header)
            verified = self._verifier.verify(plan, trees)
        row_start = plan.row_start(trees.num_nodes.tolist()) if self._drafter else ()
        self._last = _LastStep(plan, verified.features, row_start)

    def _receive(self, shape: Sequence[int]) -> Tensor:
        buffer = torch.empty(tuple(shape), dtype=torch.int32, device=self._device)
        return self._collectives.broadcast(buffer)


def _pack_trees(trees: DraftTrees) -> Tensor:
    """[R, N * (3 + W) + 1] int32: token, parent, depth, mask words, node count."""
    columns = (trees.token, trees.parent, trees.depth, trees.mask.flatten(1))
    return torch.cat([*columns, trees.num_nodes[:, None]], dim=1).contiguous()


def _unpack_trees(packed: Tensor, header: StepHeader) -> DraftTrees:
    n, w = header.num_nodes, header.num_words
    token, parent, depth, mask, num_nodes = packed.split([n, n, n, n * w, 1], dim=1)
    return DraftTrees(
        token=token,
        parent=parent,
        depth=depth,
        score=torch.zeros_like(token),
        mask=mask.unflatten(1, (n, w)),
        num_nodes=num_nodes[:, 0],
    )


def _pack_paths(paths: AcceptedPaths) -> Tensor:
    """[R, D + 2] int32: nodes, length, bonus."""
    return torch.cat([paths.node, paths.length[:, None], paths.bonus[:, None]], dim=1).contiguous()


def _unpack_paths(packed: Tensor) -> AcceptedPaths:
    return AcceptedPaths(node=packed[:, :-2], length=packed[:, -2], bonus=packed[:, -1])
