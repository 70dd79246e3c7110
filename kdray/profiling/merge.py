"""All ranks' traces and the driver's verbs as one file for Perfetto (ui.perfetto.dev).

    python -m kdray.profiling.merge FOLDER

reads the files of one profile (recorder.py) and writes merged.json.gz, summary.json and summary.txt
beside them. A process of its own does this, so that no rank waits for it; it imports no torch.

The driver is process 1 and rank r process 10 + r. Thread numbers are unique in the file, because
the importer looks threads up by number alone. Microseconds count from the first event.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kdray.profiling import summary
from kdray.profiling.trace import GPU_KINDS, Arrow, Json, RankTrace, Slice, Track, read_json
from kdray.profiling.trace import read_trace as read_rank

DRIVER_PID, FIRST_RANK_PID = 1, 10
_THREADS_A_PROCESS = 1000
_ROUNDING_NS = 2000  # a child may seem to outlive its parent by what rounding adds
_DRIVER = Track("driver", "verbs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One process of the merged file: its number, its name, and what happened in it."""

    pid: int
    name: str
    slices: Sequence[Slice]
    arrows: Sequence[Arrow] = ()
    track_names: Mapping[Track, str]


def main(argv: Sequence[str]) -> int:
    [folder] = map(Path, argv)
    merge_folder(folder)
    return 0


def merge_folder(folder: Path) -> None:
    """Merge the profile in `folder`; ranks that could not record are missing in the result."""
    traces = [read_rank(path, _rank(path)) for path in _by_rank(folder, "trace.json.gz")]
    spans = {_rank(path): read_json(path) for path in _by_rank(folder, "spans.json")}
    merged = merge(traces, spans.get(0, []))
    with gzip.open(folder / "merged.json.gz", "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump(merged, file, separators=(",", ":"))
    tables = {trace.rank: summary.summarise(trace) for trace in traces}
    texts = [summary.as_text(rank, rows) for rank, rows in tables.items()]
    (folder / "summary.txt").write_text("\n\n".join(texts) + "\n")
    found = {f"rank-{rank}": summary.as_json(rows) for rank, rows in tables.items()}
    (folder / "summary.json").write_text(json.dumps(found, indent=1))


def merge(traces: Sequence[RankTrace], driver_spans: Sequence[tuple[str, int, int]]) -> Json:
    """One trace of the driver's spans (name, start, duration in ns) and all ranks' events."""
    lanes = [_driver_lane(driver_spans)] if driver_spans else []
    lanes += [_rank_lane(trace) for trace in traces]
    starts = [item.start_ns for lane in lanes for item in lane.slices]
    origin = min(starts, default=0)
    metadata: list[Json] = []
    events: list[Json] = []
    for order, lane in enumerate(lanes):
        tids = _tids(lane)
        metadata += _metadata(lane, tids, order)
        events += _events(lane, tids, origin)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"origin_unix_ns": str(origin)},
        "traceEvents": metadata + events,
    }


def _driver_lane(spans: Sequence[tuple[str, int, int]]) -> Lane:
    slices = [
        Slice(
            track=_DRIVER,
            name=name,
            kind="step" if name.startswith("step ") else "verb",
            start_ns=start,
            end_ns=start + duration,
            args={},
        )
        for name, start, duration in spans
    ]
    return Lane(
        pid=DRIVER_PID, name="driver", slices=_nested(slices), track_names={_DRIVER: "verbs"}
    )


def _rank_lane(trace: RankTrace) -> Lane:
    return Lane(
        pid=FIRST_RANK_PID + trace.rank,
        name=f"rank {trace.rank}",
        slices=_nested(trace.slices),
        arrows=trace.arrows,
        track_names={**trace.track_names, **dict.fromkeys(_stepping(trace), "steps")},
    )


def _stepping(trace: RankTrace) -> set[Track]:
    """The thread that runs the steps: the one with the recorder's ranges of verbs."""
    ranges = (item for item in trace.slices if item.kind == "user_annotation")
    return {item.track for item in ranges if item.name == "verify"}


def _nested(slices: Iterable[Slice]) -> list[Slice]:
    """Slices of a track inside or behind one another, as the importer wants them.

    What outlives its parent by a rounding ends with it; what truly overlaps moves to a track of
    its own.
    """
    tracks: defaultdict[Track, list[Slice]] = defaultdict(list)
    for item in slices:
        tracks[item.track].append(item)
    done: list[Slice] = []
    for track, row in tracks.items():
        fitting, beside = _fit(row)
        done += fitting
        if beside:
            other = Track(track.process, f"{track.thread} beside")
            done += _nested(
                Slice(
                    track=other,
                    name=item.name,
                    kind=item.kind,
                    start_ns=item.start_ns,
                    end_ns=item.end_ns,
                    args=item.args,
                )
                for item in beside
            )
    return done


def _fit(row: Sequence[Slice]) -> tuple[list[Slice], list[Slice]]:
    fitting: list[Slice] = []
    beside: list[Slice] = []
    ends: list[int] = []
    for item in sorted(row, key=lambda item: (item.start_ns, -item.end_ns)):
        while ends and ends[-1] <= item.start_ns:
            ends.pop()
        if ends and item.end_ns > ends[-1]:
            if item.end_ns - ends[-1] > _ROUNDING_NS:
                beside.append(item)
                continue
            item = item.until(ends[-1])
        fitting.append(item)
        ends.append(item.end_ns)
    return fitting, beside


def _tids(lane: Lane) -> dict[Track, int]:
    """Numbers for the tracks: the host's threads first, then the GPU's streams."""
    on_gpu = {item.track: item.kind in GPU_KINDS for item in lane.slices}
    ordered = sorted(on_gpu, key=lambda track: (on_gpu[track], track.process, track.thread))
    first = lane.pid * _THREADS_A_PROCESS
    return {track: first + i for i, track in enumerate(ordered)}


def _metadata(lane: Lane, tids: Mapping[Track, int], order: int) -> Iterator[Json]:
    head: Json = {"ph": "M", "pid": lane.pid, "ts": 0}
    yield head | {"name": "process_name", "tid": 0, "args": {"name": lane.name}}
    yield head | {"name": "process_sort_index", "tid": 0, "args": {"sort_index": order}}
    for track, tid in tids.items():
        name = lane.track_names.get(track, track.thread)
        yield head | {"name": "thread_name", "tid": tid, "args": {"name": name}}
        yield head | {"name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}}


def _events(lane: Lane, tids: Mapping[Track, int], origin: int) -> Iterator[Json]:
    for item in lane.slices:
        yield {
            "ph": "X",
            "pid": lane.pid,
            "tid": tids[item.track],
            "ts": (item.start_ns - origin) / 1000,
            "dur": (item.end_ns - item.start_ns) / 1000,
            "name": item.name,
            "cat": item.kind,
            "args": item.args,
        }
    whole = _whole_arrows(lane.arrows, tids)
    for arrow in whole:
        event: Json = {
            "ph": "s" if arrow.is_start else "f",
            "pid": lane.pid,
            "tid": tids[arrow.track],
            "ts": (arrow.at_ns - origin) / 1000,
            "name": arrow.name,
            "cat": arrow.kind,
            "id": f"{lane.pid}-{arrow.kind}-{arrow.mark}",  # ranks count alike
        }
        yield event if arrow.is_start else event | {"bp": "e"}


def _whole_arrows(arrows: Iterable[Arrow], tids: Mapping[Track, int]) -> list[Arrow]:
    """Arrows with both ends on tracks that are there."""
    found: defaultdict[tuple[str, str], list[Arrow]] = defaultdict(list)
    for arrow in arrows:
        if arrow.track in tids:
            found[arrow.kind, arrow.mark].append(arrow)
    pairs = (ends for ends in found.values() if {end.is_start for end in ends} == {True, False})
    return [end for ends in pairs for end in ends]


def _by_rank(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"rank-*.{suffix}"), key=_rank)


def _rank(path: Path) -> int:
    return int(path.name.partition(".")[0].removeprefix("rank-"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
