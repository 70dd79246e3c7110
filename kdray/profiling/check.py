"""What Perfetto's importer of JSON traces wants of a file: a list of what is amiss.

Sources: the Trace Event Format's own description, and the importer's rule that complete events of
one thread lie inside or behind one another (it drops those that overlap).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

_PHASES = frozenset("XMsfi")


def problems(trace: Mapping[str, Any]) -> list[str]:
    """Empty where the merged trace can be opened as it is meant."""
    events = trace.get("traceEvents")
    if not isinstance(events, list) or not events:
        return ["traceEvents is not a list with events"]
    if misshapen := [*_fields(events)]:
        return misshapen  # the rest relies on these
    return [*_names(events), *_times(events), *_nesting(events), *_flows(events)]


def _fields(events: list[dict[str, Any]]) -> Iterator[str]:
    for index, event in enumerate(events):
        if event.get("ph") not in _PHASES:
            yield f"event {index}: phase {event.get('ph')!r}"
        for name in ("pid", "tid"):
            if type(event.get(name)) is not int:
                yield f"event {index}: {name} {event.get(name)!r} is not a whole number"
        if event.get("ph") == "X" and not event.get("dur", -1) >= 0:
            yield f"event {index}: dur {event.get('dur')!r}"


def _names(events: list[dict[str, Any]]) -> Iterator[str]:
    """Every process and thread has a name, and no thread number belongs to two processes."""
    named = {
        kind: {
            (event["pid"], event["tid"] if kind == "thread_name" else None)
            for event in events
            if event["ph"] == "M" and event["name"] == kind and event["args"].get("name")
        }
        for kind in ("process_name", "thread_name")
    }
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}
    for pid, tid in sorted(used):
        if (pid, None) not in named["process_name"]:
            yield f"process {pid} has no name"
        if (pid, tid) not in named["thread_name"]:
            yield f"thread {tid} of process {pid} has no name"
    owners = defaultdict(set)
    for pid, tid in used:
        owners[tid].add(pid)
    yield from (f"thread {tid} is in {len(pids)} processes" for tid, pids in owners.items()
                if len(pids) > 1)  # fmt: skip


def _times(events: list[dict[str, Any]]) -> Iterator[str]:
    times = [event["ts"] for event in events if event["ph"] != "M"]
    if any(ts < 0 for ts in times):
        yield "an event begins before 0"
    if any(later < earlier for earlier, later in pairwise(times)):
        yield "events are not in the order of their time"
    if times and max(times) > 3600e6:
        yield "events span more than an hour: are their times microseconds?"


def _nesting(events: list[dict[str, Any]]) -> Iterator[str]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            # In whole nanoseconds: sums of microseconds round.
            start = round(event["ts"] * 1000)
            tracks[event["tid"]].append((start, start + round(event["dur"] * 1000)))
    for tid, spans in tracks.items():
        ends: list[int] = []
        for start, end in spans:
            while ends and ends[-1] <= start:
                ends.pop()
            if ends and end > ends[-1]:
                yield f"thread {tid}: a slice at {start} ns outlives the one around it"
            ends.append(end)


def _flows(events: list[dict[str, Any]]) -> Iterator[str]:
    ends = defaultdict(set)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].add(event["ph"])
    yield from (f"arrow {number} has one end" for number, found in ends.items() if len(found) < 2)
