"""The step header: what rank 0 tells the other ranks before a step, in a fixed layout, no pickle.

    magic, kind, step, requests R, nodes N, draft words W, commit (1 where paths of the step before
    are to be applied), path width D            8 int32
    per request: slot, num_cached, known m, budget, pages P, samples    6 int32
    known tokens of all requests, then page tables of all requests      int32

ROUND, a device round (core.plan.RoundOrder), has 8 int32 as well (R and N of the bucket, for W the
number of changed page tables, commit and width as above), then
    slots of the R rows, and per changed table: slot, pages P    int32
    those page tables                                            int32

DRAFT, which has the ranks that share a drafter draft for a plan, is laid out as a STEP.

PROFILE, which tells the ranks to record from the next step on, has 8 int32 as well (magic, kind, 0,
flags, bytes of the folder's name, 0, 0, 0) and then that name in UTF-8, padded to whole words.

Token ids, masks and paths live on the device and travel by broadcast (rank_group); only what the
host decides is here. Sampling parameters are not: rank 0 draws.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kdray.core.plan import PlannedRequest, RoundOrder, StepPlan
from kdray.core.profile import ProfileOrder
from kdray.core.request import SamplingParams

MAGIC = 0x6B647231  # "kdr1": a header of another version is refused, not misread
_HEAD = 8
_PER_REQUEST = 6
_GREEDY = SamplingParams()


class Kind(enum.IntEnum):
    STEP = 1
    STOP = 2
    PROFILE = 3
    PROFILE_END = 4
    ROUND = 5
    DRAFT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """One message. Only STEP and DRAFT have a plan and only a ROUND an order; plans arrive without
    what only rank 0 needs.
    """

    kind: Kind
    plan: StepPlan | None
    num_nodes: int = 0
    num_words: int = 0
    commit_width: int = 0
    profile: ProfileOrder | None = None
    round: RoundOrder | None = None

    @property
    def commits(self) -> bool:
        return self.commit_width > 0


def encode(header: StepHeader) -> bytes:
    if header.profile is not None:
        return _encode_profile(header.profile)
    if header.round is not None:
        return _encode_round(header.round, header.commit_width)
    requests = header.plan.requests if header.plan else ()
    step = header.plan.step if header.plan else 0
    head = [
        MAGIC,
        int(header.kind),
        step & 0x7FFFFFFF,
        len(requests),
        header.num_nodes,
        header.num_words,
        int(header.commits),
        header.commit_width,
    ]
    table = [
        (r.slot, r.num_cached, len(r.known), r.budget, len(r.pages), int(r.samples))
        for r in requests
    ]
    parts = [
        np.array(head, dtype=np.int32),
        np.array(table, dtype=np.int32).reshape(-1),
        *(r.known for r in requests),
        *(r.pages for r in requests),
    ]
    return np.concatenate(parts).astype("<i4").tobytes()


def decode(message: bytes) -> StepHeader:
    """Raises ValueError on a message of another version or of the wrong length."""
    words: NDArray[np.int32] = np.frombuffer(message, dtype="<i4").astype(np.int32, copy=False)
    if len(words) < _HEAD or words[0] != MAGIC:
        raise ValueError("not a step header of this version: do all ranks run the same kdray?")
    kind, step, count, num_nodes, num_words, _, commit_width = words[1:_HEAD].tolist()
    if Kind(kind) is Kind.PROFILE:
        return _decode_profile(words)
    if Kind(kind) is Kind.ROUND:
        return _decode_round(words)
    if Kind(kind) not in (Kind.STEP, Kind.DRAFT):
        return StepHeader(kind=Kind(kind), plan=None)
    table = words[_HEAD : _HEAD + count * _PER_REQUEST].reshape(count, _PER_REQUEST)
    body = words[_HEAD + count * _PER_REQUEST :]
    if len(body) != int(table[:, 2].sum() + table[:, 4].sum()):
        raise ValueError("a step header of the wrong length")
    known_end = np.cumsum(table[:, 2])
    pages_end = known_end[-1] + np.cumsum(table[:, 4]) if count else table[:, 4]
    requests = tuple(
        _request(row, body[known_end[r] - row[2] : known_end[r]], body[end - row[4] : end])
        for r, (row, end) in enumerate(zip(table, pages_end, strict=True))
    )
    return StepHeader(
        kind=Kind(kind),
        plan=StepPlan(step=step, requests=requests),
        num_nodes=num_nodes,
        num_words=num_words,
        commit_width=commit_width,
    )


def _encode_round(order: RoundOrder, commit_width: int) -> bytes:
    requests, num_nodes = order.size
    commits = int(commit_width > 0)
    head = [MAGIC, int(Kind.ROUND), 0, requests, num_nodes, len(order.tables), commits]
    moved = [(slot, len(pages)) for slot, pages in order.tables]
    parts = [
        np.array([*head, commit_width], dtype=np.int32),
        order.slot,
        np.array(moved, dtype=np.int32).reshape(-1),
        *(pages for _, pages in order.tables),
    ]
    return np.concatenate(parts).astype("<i4").tobytes()


def _decode_round(words: NDArray[np.int32]) -> StepHeader:
    requests, num_nodes, count, _, commit_width = words[3:_HEAD].tolist()
    slot, body = words[_HEAD : _HEAD + requests], words[_HEAD + requests :]
    moved, body = body[: 2 * count].reshape(count, 2), body[2 * count :]
    ends = np.cumsum(moved[:, 1])
    if len(slot) != requests or len(moved) != count or len(body) != int(moved[:, 1].sum()):
        raise ValueError("a round's header of the wrong length")
    tables = tuple(
        (int(at), body[end - length : end])
        for (at, length), end in zip(moved.tolist(), ends.tolist(), strict=True)
    )
    order = RoundOrder(size=(requests, num_nodes), slot=slot, tables=tables)
    return StepHeader(kind=Kind.ROUND, plan=None, commit_width=commit_width, round=order)


def _encode_profile(order: ProfileOrder) -> bytes:
    name = order.folder.encode()
    head = [MAGIC, int(Kind.PROFILE), 0, order.flags, len(name), 0, 0, 0]
    return np.array(head, dtype="<i4").tobytes() + name + b"\0" * (-len(name) % 4)


def _decode_profile(words: NDArray[np.int32]) -> StepHeader:
    flags, length = words[3:5].tolist()
    name = words[_HEAD:].astype("<i4").tobytes()[:length]
    if len(name) != length:
        raise ValueError("a profile's header of the wrong length")
    order = ProfileOrder.from_flags(flags, name.decode())
    return StepHeader(kind=Kind.PROFILE, plan=None, profile=order)


def _request(
    row: NDArray[np.int32], known: NDArray[np.int32], pages: NDArray[np.int32]
) -> PlannedRequest:
    slot, num_cached, _, budget, _, samples = row.tolist()
    return PlannedRequest(
        request_id="",
        slot=slot,
        num_cached=num_cached,
        known=known,
        budget=budget,
        pages=pages,
        samples=bool(samples),
        sampling=_GREEDY,
        seed=0,
        num_prompt=0,
    )
