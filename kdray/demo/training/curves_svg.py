"""Draw the loss curves: python -m kdray.demo.training.curves_svg curves.json curves.svg"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT, MARGIN, GAP = 420, 260, 44, 24
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f")


@dataclass(frozen=True)
class Line:
    """One curve: a name, steps and positive values."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """One chart; values on a logarithmic axis from ``low`` to ``high``."""

    title: str
    lines: tuple[Line, ...]
    ticks: tuple[float, ...]

    @property
    def low(self) -> float:
        return self.ticks[0]

    @property
    def high(self) -> float:
        return self.ticks[-1]


def main(arguments: Sequence[str]) -> None:
    """Read curves.json, write the SVG."""
    source, destination = map(Path, arguments)
    record = json.loads(source.read_text())
    Path(destination).write_text(draw(panels_of(record)), encoding="utf-8")


def panels_of(record: dict[str, object]) -> tuple[Panel, ...]:
    """The target's loss, and the slots of the kept drafter."""
    target = _curve(record["target"])
    drafters = record["drafters"]
    assert isinstance(drafters, list)
    kept = _curve(drafters[int(str(record["kept_drafter"]))])
    slots = tuple(
        Line(f"slot {slot}", kept.steps, kept.losses[f"slot_{slot}"]) for slot in (1, 4, 7)
    )
    loss = Line("training", target.steps, target.losses["nats_per_token"])
    return (
        Panel("target, nats a token", (loss,), (0.2, 0.3, 0.5, 1.0, 2.0, 7.0)),
        Panel("kept drafter, nats a token by slot", slots, (0.2, 0.5, 1.0, 2.0, 8.0)),
    )


@dataclass(frozen=True)
class _Curve:
    steps: list[int]
    losses: dict[str, list[float]]


def _curve(part: object) -> _Curve:
    assert isinstance(part, dict)
    return _Curve(part["steps"], part["losses"])


def draw(panels: Sequence[Panel]) -> str:
    """An SVG with the panels side by side."""
    width = len(panels) * (WIDTH + GAP)
    body = "\n".join(_panel(panel, index * (WIDTH + GAP)) for index, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _panel(panel: Panel, left: int) -> str:
    last = max(line.steps[-1] for line in panel.lines)
    parts = [f'<text x="{left + MARGIN}" y="18" font-weight="bold">{panel.title}</text>']
    for tick in panel.ticks:
        y = _y(panel, tick)
        parts.append(
            f'<line x1="{left + MARGIN}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="#dddddd"/><text x="{left + MARGIN - 6}" y="{y + 4:.1f}" '
            f'text-anchor="end">{tick:g}</text>'
        )
    for quarter in range(5):
        step = last * quarter // 4
        x = _x(left, step, last)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{step}</text>'
        )
    for index, (line, colour) in enumerate(zip(panel.lines, COLOURS, strict=False)):
        points = " ".join(
            f"{_x(left, step, last):.1f},{_y(panel, value):.1f}"
            for step, value in zip(line.steps, line.values, strict=True)
        )
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.4" points="{points}"/>'
            f'<text x="{left + WIDTH - 6}" y="{44 + 15 * index}" text-anchor="end" '
            f'fill="{colour}">{line.name}</text>'
        )
    return "\n".join(parts)


def _x(left: int, step: int, last: int) -> float:
    return left + MARGIN + (WIDTH - MARGIN) * step / last


def _y(panel: Panel, value: float) -> float:
    clipped = min(max(value, panel.low), panel.high)
    share = math.log(clipped / panel.low) / math.log(panel.high / panel.low)
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share


if __name__ == "__main__":
    main(sys.argv[1:])
