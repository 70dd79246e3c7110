"""Events of one rank's trace, brought to the clock that all processes of a host share.

Times are integer nanoseconds since the epoch: a float of microseconds has not enough digits to add
them exactly.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Json = dict[str, Any]
GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Track:
    """One row of events: a thread on the host, or a stream on the GPU."""

    process: str
    thread: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A named stretch of a track."""

    track: Track
    name: str
    kind: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any]

    def until(self, end_ns: int) -> Slice:
        return replace(self, end_ns=end_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """One end of an arrow between two slices; both ends share a mark."""

    track: Track
    name: str
    kind: str
    mark: str
    is_start: bool
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank recorded; names of tracks as its profiler gave them."""

    rank: int
    slices: tuple[Slice, ...]
    arrows: tuple[Arrow, ...]
    track_names: Mapping[Track, str]


def read_json(path: Path) -> Any:
    """A JSON file, packed by gzip or not."""
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as file:
            return json.load(file)
    return json.loads(path.read_bytes())


def read_trace(path: Path, rank: int) -> RankTrace:
    """A file of torch.profiler's; what spans the whole recording and says nothing is left out."""
    content = read_json(path)
    base_ns = int(content.get("baseTimeNanoseconds", 0))
    events = [event for event in content["traceEvents"] if isinstance(event.get("pid"), int)]
    return RankTrace(
        rank=rank,
        slices=tuple(_slices(events, base_ns)),
        arrows=tuple(_arrows(events, base_ns)),
        track_names={
            _track(event): str(event["args"]["name"])
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        },
    )


def _slices(events: list[Json], base_ns: int) -> Iterator[Slice]:
    for event in events:
        if event["ph"] != "X":
            continue
        start = _ns(event["ts"], base_ns)
        yield Slice(
            track=_track(event),
            name=str(event["name"]),
            kind=str(event.get("cat", "")),
            start_ns=start,
            end_ns=start + max(round(event.get("dur", 0) * 1000), 0),
            args=event.get("args", {}),
        )


def _arrows(events: list[Json], base_ns: int) -> Iterator[Arrow]:
    for event in events:
        if event["ph"] in ("s", "f"):
            yield Arrow(
                track=_track(event),
                name=str(event["name"]),
                kind=str(event.get("cat", "")),
                mark=str(event["id"]),
                is_start=event["ph"] == "s",
                at_ns=_ns(event["ts"], base_ns),
            )


def _track(event: Json) -> Track:
    return Track(str(event["pid"]), str(event["tid"]))


def _ns(microseconds: float, base_ns: int) -> int:
    return base_ns + round(microseconds * 1000)
