"""Where a rank's time went: kernels on a GPU, operations' own time on a CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kdray.profiling.trace import GPU_KINDS, RankTrace, Slice, Track

NAME_WIDTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One line of a rank's table.

    us      time in it, in microseconds; on a CPU without what it called
    share   of the time of all rows
    """

    kernel: str
    calls: int
    us: float
    share: float


def summarise(trace: RankTrace) -> list[KernelRow]:
    """The rank's kernels, or where it ran none its operations; the longest first."""
    kernels = [item for item in trace.slices if item.kind in GPU_KINDS]
    own = (
        ((item.name, item.end_ns - item.start_ns) for item in kernels)
        if kernels
        else _own_times(item for item in trace.slices if item.kind == "cpu_op")
    )
    calls: defaultdict[str, int] = defaultdict(int)
    spent: defaultdict[str, int] = defaultdict(int)
    for name, nanoseconds in own:
        calls[name] += 1
        spent[name] += nanoseconds
    total = sum(spent.values()) or 1
    return [
        KernelRow(kernel=name, calls=calls[name], us=ns / 1000, share=ns / total)
        for name, ns in sorted(spent.items(), key=lambda pair: (-pair[1], pair[0]))
    ]


def as_text(rank: int, rows: Sequence[KernelRow], most: int = 20) -> str:
    """The table of one rank, its longest rows only."""
    lines = [f"rank {rank}", f"{'kernel':<{NAME_WIDTH}} {'calls':>8} {'us':>12} {'share':>7}"]
    for row in rows[:most]:
        name = row.kernel if len(row.kernel) <= NAME_WIDTH else f"{row.kernel[: NAME_WIDTH - 3]}..."
        lines.append(f"{name:<{NAME_WIDTH}} {row.calls:>8} {row.us:>12.1f} {row.share:>7.1%}")
    if len(rows) > most:
        rest = rows[most:]
        calls, us = sum(row.calls for row in rest), sum(row.us for row in rest)
        share = sum(row.share for row in rest)
        lines.append(f"{f'{len(rest)} more':<{NAME_WIDTH}} {calls:>8} {us:>12.1f} {share:>7.1%}")
    return "\n".join(lines)


def as_json(rows: Sequence[KernelRow]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def _own_times(slices: Iterable[Slice]) -> Iterator[tuple[str, int]]:
    """Each slice's name and the nanoseconds that no slice inside it took."""
    tracks: defaultdict[Track, list[Slice]] = defaultdict(list)
    for item in slices:
        tracks[item.track].append(item)
    for row in tracks.values():
        yield from _own_times_of_track(row)


def _own_times_of_track(row: list[Slice]) -> Iterator[tuple[str, int]]:
    open_slices: list[tuple[Slice, list[int]]] = []  # with the nanoseconds of their children

    def closed() -> tuple[str, int]:
        item, inner = open_slices.pop()
        return item.name, max(item.end_ns - item.start_ns - sum(inner), 0)

    for item in sorted(row, key=lambda item: (item.start_ns, -item.end_ns)):
        while open_slices and open_slices[-1][0].end_ns <= item.start_ns:
            yield closed()
        if open_slices:
            open_slices[-1][1].append(min(item.end_ns, open_slices[-1][0].end_ns) - item.start_ns)
        open_slices.append((item, []))
    while open_slices:
        yield closed()
