"""Metrics as data: families of samples, and Prometheus text made of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "kdray_"
Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One number; `suffix` is _bucket, _sum or _count in a histogram, else empty."""

    value: float
    labels: Labels = ()
    suffix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All samples of one metric; its name carries the prefix."""

    name: str
    kind: Kind
    text: str
    samples: tuple[Sample, ...]


def single(name: str, kind: Kind, text: str, value: float) -> Family:
    return Family(name=PREFIX + name, kind=kind, text=text, samples=(Sample(value),))


def labelled(
    name: str, kind: Kind, text: str, label: str, values: Mapping[str, float] | Mapping[int, float]
) -> Family:
    """A sample for each value of one label."""
    samples = tuple(Sample(value, ((label, str(key)),)) for key, value in values.items())
    return Family(name=PREFIX + name, kind=kind, text=text, samples=samples)


def histogram(
    name: str, text: str, bounds: Iterable[float], counts: Sequence[int], total: float
) -> Family:
    """`counts` has one item a bound, and a last one for what lies above all of them."""
    running = list(accumulate(counts))
    samples = [
        Sample(count, (("le", str(bound)),), "_bucket")
        for bound, count in zip(bounds, running, strict=False)
    ]
    samples += [
        Sample(running[-1], (("le", "+Inf"),), "_bucket"),
        Sample(total, suffix="_sum"),
        Sample(running[-1], suffix="_count"),
    ]
    return Family(name=PREFIX + name, kind="histogram", text=text, samples=tuple(samples))


class Histogram:
    """Counts below upper bounds, with their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> Family:
        return histogram(name, text, self._bounds, self._counts, self._sum)


def as_text(families: Iterable[Family]) -> str:
    """The page that Prometheus reads."""
    return "".join(f"{line}\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {family.text}"
    yield f"# TYPE {family.name} {family.kind}"
    for sample in family.samples:
        inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels)
        labels = f"{{{inner}}}" if inner else ""
        yield f"{family.name}{sample.suffix}{labels} {_number(sample.value)}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
