#!/usr/bin/env python3
"""Draws a stretch of a merged profile as lanes over time, from the trace file and nothing else.

pip install -e '.[plots]' && python benchmarks/draw_trace.py merged.json.gz --out profile.png

For pages that cannot show Perfetto itself, which has every event, its arguments and zoom.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    sys.exit("drawing needs matplotlib: pip install -e '.[plots]'")

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

# Okabe and Ito's palette, by verb; the rest in greys.
VERBS = {
    "draft": "#0072B2", "build": "#E69F00", "verify": "#009E73", "accept": "#CC79A7",
    "commit": "#D55E00", "schedule": "#999999", "launch": "#56B4E9", "wait": "#DDDDDD",
}  # fmt: skip
GROUPS = {"collectives": "#8B2252", "matrix products": "#444444", "other operations": "#BBBBBB"}
ROW = 0.8
Event = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of the picture: its label, and slices with the level they lie at."""

    label: str
    slices: list[tuple[int, Event]]

    @property
    def levels(self) -> int:
        return 1 + max((level for level, _ in self.slices), default=0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, default=Path("profile.png"))
    parser.add_argument("--first-step", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--levels", type=int, default=3, help="of nested operations a thread")
    arguments = parser.parse_args(argv)
    opened = gzip.open if arguments.trace.suffix == ".gz" else open
    with opened(arguments.trace, "rb") as file:
        events = json.load(file)["traceEvents"]
    begin, end = stretch(events, arguments.first_step, arguments.steps)
    draw(rows(events, begin, end, arguments.levels), begin, end, arguments.out)
    return 0


def stretch(events: Iterable[Event], first: int, steps: int) -> tuple[float, float]:
    """From the begin of one step to the end of another, in microseconds."""
    found = {e["name"]: e for e in events if e.get("cat") == "step"}
    names = [f"step {first}", f"step {first + steps - 1}"]
    missing = [name for name in names if name not in found]
    if missing:
        sys.exit(f"the trace has no {missing[0]}; it has {len(found)} steps")
    last = found[names[1]]
    return found[names[0]]["ts"], last["ts"] + last["dur"]


def rows(events: Sequence[Event], begin: float, end: float, levels: int) -> list[Row]:
    """A row a track that has slices in the stretch, in the order Perfetto would sort them."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["ts"] < end and event["ts"] + event["dur"] > begin:
            tracks[event["pid"], event["tid"]].append(event)
    return [
        Row(f"{processes[pid]}\n{threads[tid]}", [p for p in nested(found) if p[0] < levels])
        for (pid, tid), found in sorted(tracks.items())
    ]


def nested(found: Sequence[Event]) -> Iterable[tuple[int, Event]]:
    """Slices with how deep they lie in others."""
    ends: list[float] = []
    for event in sorted(found, key=lambda e: (e["ts"], -e["dur"])):
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        yield len(ends), event
        ends.append(event["ts"] + event["dur"])


def draw(found: Sequence[Row], begin: float, end: float, out: Path) -> None:
    plt.rcParams.update({"font.size": 8, "savefig.dpi": 140})
    height = sum(row.levels for row in found)
    figure, axes = plt.subplots(figsize=(10, 1.1 + 0.34 * height), layout="constrained")
    top, ticks = 0.0, []
    for row in found:
        draw_row(axes, row, top, begin)
        ticks.append(top + row.levels / 2)
        top += row.levels
        axes.axhline(top, color="#CCCCCC", linewidth=0.5)
    axes.set_yticks(ticks, [row.label for row in found])
    axes.set_ylim(top, 0)
    axes.set_xlim(0, (end - begin) / 1000)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    shown = [Patch(color=colour, label=name) for name, colour in (VERBS | GROUPS).items()]
    figure.legend(handles=shown, ncols=6, loc="outside upper center", frameon=False)
    figure.savefig(out)


def draw_row(axes: Axes, row: Row, top: float, begin: float) -> None:
    bars: defaultdict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for level, event in row.slices:
        left, width = (event["ts"] - begin) / 1000, event["dur"] / 1000
        bars[level, colour_of(event)].append((left, width))
        if (event.get("cat") == "step" or event["name"] in VERBS) and width > 1.5:
            axes.text(left + width / 2, top + level + 0.5, event["name"], ha="center", va="center",
                      fontsize=6, clip_on=True)  # fmt: skip
    for (level, colour), spans in bars.items():
        place = (top + level + (1 - ROW) / 2, ROW)
        axes.broken_barh(spans, place, color=colour, linewidth=0.1, edgecolor="white")


def colour_of(event: Event) -> str:
    name = event["name"]
    if event.get("cat") in ("verb", "user_annotation") and name in VERBS:
        return VERBS[name]
    if event.get("cat") == "step":
        return "#EEEEEE"
    if any(word in name for word in ("c10d", "gloo", "nccl")):
        return GROUPS["collectives"]
    if any(word in name for word in ("mm", "linear", "matmul", "gemm", "bmm")):
        return GROUPS["matrix products"]
    return GROUPS["other operations"]


if __name__ == "__main__":
    sys.exit(main())
