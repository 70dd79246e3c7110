"""What is mirrored into Ray's metrics, seen through stand-ins for Ray's classes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kdray.serve import ray_metrics
from kdray.serve.families import Family, histogram, labelled, single


class Seen:
    """Every metric that was made, by name, with its value by labels."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self.kinds: dict[str, str] = {}

    def make(self, kind: str) -> Any:
        seen = self

        class Metric:
            def __init__(self, name: str, text: str, tag_keys: Sequence[str]) -> None:
                assert name not in seen.kinds and text
                seen.kinds[name], self.name, self.keys = kind, name, set(tag_keys)
                seen.values[name] = {}

            def set(self, value: float, tags: dict[str, str]) -> None:
                assert set(tags) == self.keys
                seen.values[self.name][tuple(tags.items())] = value

            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert value > 0
                before = seen.values[self.name].get(tuple(tags.items()), 0)
                self.set(before + value, tags)

        return Metric


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()
    monkeypatch.setattr(ray_metrics, "Gauge", seen.make("gauge"))
    monkeypatch.setattr(ray_metrics, "Counter", seen.make("counter"))
    return seen


def page(total: int) -> list[Family]:
    return [
        labelled("requests_total", "counter", "Requests.", "finish_reason", {"stop": total}),
        single("pages_used", "gauge", "Pages.", 7),
        histogram("accept_length", "Lengths.", [1, 2], [3, total, 0], 9.0),
    ]


def test_counters_grow_and_the_rest_is_set(seen: Seen) -> None:
    mirrored = ray_metrics.RayMirror()
    for total in (0, 2, 5, 5):
        mirrored.update(page(total))
    assert seen.kinds == {
        "kdray_requests_total": "counter",
        "kdray_pages_used": "gauge",
        "kdray_accept_length_bucket": "gauge",
        "kdray_accept_length_sum": "gauge",
        "kdray_accept_length_count": "gauge",
    }
    assert seen.values["kdray_requests_total"] == {(("finish_reason", "stop"),): 5}
    assert seen.values["kdray_accept_length_bucket"][(("le", "2"),)] == 8
    assert seen.values["kdray_accept_length_sum"][()] == 9.0


def test_an_engine_that_began_anew_goes_on_counting(seen: Seen) -> None:
    mirrored = ray_metrics.RayMirror()
    for total in (5, 2, 3):
        mirrored.update(page(total))
    assert seen.values["kdray_requests_total"] == {(("finish_reason", "stop"),): 5 + 2 + 1}


def test_a_failure_does_not_end_it(seen: Seen) -> None:
    pages: list[Any] = [RuntimeError("no stats"), page(1), page(4)]

    async def families() -> Sequence[Family]:
        if not pages:
            raise asyncio.CancelledError
        if isinstance(found := pages.pop(0), Exception):
            raise found
        return found  # type: ignore[no-any-return]

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ray_metrics.mirror(families, period_s=0))
    assert seen.values["kdray_requests_total"] == {(("finish_reason", "stop"),): 4}
