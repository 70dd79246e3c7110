"""The metrics page, mirrored into Ray's own metrics, which add a prefix: ray_kdray_...

A scraper of Ray's nodes so gets every endpoint's numbers, each under its own WorkerId; a page that
is fetched through Ray Serve's proxy is that of one endpoint, whichever the proxy chose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from ray.util.metrics import Counter, Gauge

from kdray.serve.families import Family, Labels, Sample

log = logging.getLogger("kdray.serve")
PERIOD_S = 5.0


class RayMirror:
    """Takes families over and over; counters become counters, all else gauges.

    Ray's own histograms would have to see every value, and round their sums: a histogram's samples
    are gauges here, and rate() and histogram_quantile() read them just as well.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._totals: dict[tuple[str, Labels], float] = {}

    def update(self, families: Iterable[Family]) -> None:
        for family in families:
            for sample in family.samples:
                if family.kind == "counter":
                    self._count(family, sample)
                else:
                    self._set(family, sample)

    def _count(self, family: Family, sample: Sample) -> None:
        """Adds what it grew by; after a fall, as when an engine began anew, all of it."""
        key = (family.name, sample.labels)
        before = self._totals.get(key, 0.0)
        grown = sample.value - before if sample.value >= before else sample.value
        self._totals[key] = sample.value
        if grown > 0:
            self._counter(family, sample).inc(grown, tags=dict(sample.labels))

    def _set(self, family: Family, sample: Sample) -> None:
        name = family.name + sample.suffix
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, family.text, tag_keys=_keys(sample))
        self._gauges[name].set(sample.value, tags=dict(sample.labels))

    def _counter(self, family: Family, sample: Sample) -> Counter:
        if family.name not in self._counters:
            self._counters[family.name] = Counter(family.name, family.text, tag_keys=_keys(sample))
        return self._counters[family.name]


async def mirror(
    families: Callable[[], Awaitable[Sequence[Family]]], period_s: float = PERIOD_S
) -> None:
    """Mirror them every period, until it is cancelled. A failure is said once."""
    mirrored, complained = RayMirror(), False
    while True:
        try:
            mirrored.update(await families())
        except Exception as error:
            if not complained:
                log.warning("metrics do not reach Ray: %s", error)
            complained = True
        await asyncio.sleep(period_s)


def _keys(sample: Sample) -> tuple[str, ...]:
    return tuple(name for name, _ in sample.labels)
