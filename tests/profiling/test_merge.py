"""Merging traces: lanes, times, nesting, arrows; and the check says what is amiss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdray.profiling.check import problems
from kdray.profiling.merge import merge
from kdray.profiling.summary import as_text, summarise
from kdray.profiling.trace import RankTrace, read_trace

BASE_NS = 1_790_000_000_000_000_000
Json = dict[str, Any]


def event(name: str, ts: float, dur: float, **members: Any) -> Json:
    whole = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": dur}
    return whole | members


def trace_of(tmp_path: Path, rank: int, *events: Json) -> RankTrace:
    path = tmp_path / f"rank-{rank}.trace.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": events}))
    return read_trace(path, rank)


def slices(merged: Json) -> dict[str, Json]:
    return {e["name"]: e for e in merged["traceEvents"] if e["ph"] == "X"}


def test_ranks_and_the_driver_share_a_clock(tmp_path: Path) -> None:
    ranks = [
        trace_of(tmp_path, 0, event("a", 100.5, 4.0)),
        trace_of(tmp_path, 1, event("b", 102.25, 4.0)),
    ]
    merged = merge(ranks, [("verify", BASE_NS + 99_000, 8_000)])
    assert problems(merged) == []
    found = slices(merged)
    assert [found[name]["ts"] for name in ("verify", "a", "b")] == [0.0, 1.5, 3.25]
    assert found["verify"]["dur"] == 8.0
    assert len({found[name]["pid"] for name in found}) == 3


def test_threads_of_two_ranks_keep_apart_and_keep_their_names(tmp_path: Path) -> None:
    name = {"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "ts": 0, "args": {"name": "py"}}
    stepping = event("verify", 0.0, 9.0, cat="user_annotation", tid=8)
    ranks = [trace_of(tmp_path, rank, name, event("a", 1.0, 1.0), stepping) for rank in (0, 1)]
    merged = merge(ranks, [])
    threads = [e for e in merged["traceEvents"] if e["name"] == "thread_name"]
    assert [thread["args"]["name"] for thread in threads] == ["py", "steps"] * 2
    assert len({thread["tid"] for thread in threads}) == 4


def test_what_overlaps_moves_beside_and_a_rounding_is_cut(tmp_path: Path) -> None:
    rank = trace_of(
        tmp_path,
        0,
        event("outer", 0.0, 10.0),
        event("rounded", 9.0, 1.001),
        event("across", 5.0, 90.0),
    )
    merged = merge([rank], [])
    assert problems(merged) == []
    found = slices(merged)
    assert found["rounded"]["dur"] == 1.0
    assert found["across"]["dur"] == 90.0
    assert found["across"]["tid"] != found["outer"]["tid"] == found["rounded"]["tid"]


def test_arrows_keep_to_their_rank_and_lose_those_with_one_end(tmp_path: Path) -> None:
    arrow = {"cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 7}
    ends = [
        arrow | {"ph": "s", "id": 1, "ts": 0.0},
        arrow | {"ph": "f", "id": 1, "ts": 1.0},
        arrow | {"ph": "s", "id": 2, "ts": 1.0},
    ]
    ranks = [trace_of(tmp_path, rank, event("a", 0.0, 2.0), *ends) for rank in (0, 1)]
    merged = merge(ranks, [])
    assert problems(merged) == []
    assert len({e["id"] for e in merged["traceEvents"] if e["ph"] == "s"}) == 2


def test_a_cpu_table_counts_own_time(tmp_path: Path) -> None:
    rank = trace_of(
        tmp_path,
        0,
        event("matmul", 0.0, 10.0),
        event("mm", 2.0, 6.0),
        event("mm", 20.0, 2.0),
        event("verify", 0.0, 30.0, cat="user_annotation"),
    )
    rows = summarise(rank)
    assert [(r.kernel, r.calls, r.us, r.share) for r in rows] == [
        ("mm", 2, 8.0, pytest.approx(8 / 12)),
        ("matmul", 1, 4.0, pytest.approx(4 / 12)),
    ]
    assert "1 more" in as_text(0, rows, most=1)


def test_a_gpu_table_counts_kernels_alone(tmp_path: Path) -> None:
    kernel = {"cat": "kernel", "pid": 0, "tid": 7}
    rank = trace_of(
        tmp_path, 0, event("mm", 0.0, 99.0), event("gemm", 5.0, 3.0, **kernel),
        event("copy", 9.0, 1.0, **(kernel | {"cat": "gpu_memcpy"})),
    )  # fmt: skip
    assert [(row.kernel, row.us) for row in summarise(rank)] == [("gemm", 3.0), ("copy", 1.0)]


def test_what_spans_the_whole_recording_is_left_out(tmp_path: Path) -> None:
    rank = trace_of(tmp_path, 0, event("a", 1.0, 1.0), event("Spans", 0.0, 9.0, pid="Spans"))
    assert [item.name for item in rank.slices] == ["a"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ph": "Z"}, "phase"),
        ({"pid": "seven"}, "pid"),
        ({"dur": -1}, "dur"),
        ({"tid": 99}, "no name"),
        ({"ts": -1.0}, "before 0"),
        ({"dur": 5.5}, "outlives"),
        ({"ts": 4e9}, "hour"),
    ],
)
def test_the_check_sees_what_is_amiss(tmp_path: Path, change: Json, complaint: str) -> None:
    rank = trace_of(tmp_path, 0, event("outer", 0.0, 5.0), event("inner", 1.0, 1.0))
    merged = merge([rank], [])
    assert problems(merged) == []
    broken = slices(merged)["inner"]
    broken.update(change)
    assert any(complaint in problem for problem in problems(merged)), problems(merged)


def test_an_empty_trace_is_amiss() -> None:
    assert problems({"traceEvents": []}) and problems({})
