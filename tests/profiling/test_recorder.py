"""One process's recording, and the driver's counting of steps around it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kdray.core.profile import Activity, ProfileOptions, ProfileOrder
from kdray.profiling import recorder as recording
from kdray.profiling.recorder import Recorder
from kdray.profiling.session import ALLOWANCE_S, ProfileSession
from kdray.profiling.trace import read_json, read_trace


def order(folder: Path, *activities: Activity, num_steps: int = 10) -> ProfileOrder:
    options = ProfileOptions(activities=frozenset(activities or ("CPU",)), num_steps=num_steps)
    return ProfileOrder(options=options, folder=str(folder))


def multiply() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


def done(folder: Path, rank: int = 3) -> Any:
    return read_json(folder / f"rank-{rank}.done")


def test_what_runs_meanwhile_is_in_the_files(tmp_path: Path) -> None:
    recorder = Recorder(rank=3)
    with recorder.range("before"):
        multiply()
    recorder.begin(order(tmp_path))
    assert recorder.is_recording
    with recorder.range("verify"):
        multiply()
    recorder.end()
    with recorder.range("after"):
        multiply()
    recorder.join()
    assert done(tmp_path)["error"] is None
    assert [name for name, *_ in read_json(tmp_path / "rank-3.spans.json")] == ["verify"]
    trace = read_trace(tmp_path / "rank-3.trace.json.gz", 3)
    names = {item.name for item in trace.slices}
    assert "verify" in names and "aten::matmul" in names and not names & {"before", "after"}


def test_spans_and_events_share_a_clock(tmp_path: Path) -> None:
    recorder = Recorder(rank=3)
    recorder.begin(order(tmp_path))
    with recorder.range("outer"), recorder.range("inner"):
        multiply()
    recorder.end()
    recorder.join()
    spans = {
        name: (start, start + ns) for name, start, ns in read_json(tmp_path / "rank-3.spans.json")
    }
    [event] = [
        e for e in read_trace(tmp_path / "rank-3.trace.json.gz", 3).slices if e.name == "inner"
    ]
    first, last = spans["outer"]
    slack = 100_000_000  # nanoseconds: the profiler's clock is converted, this one is read
    assert first - slack <= event.start_ns and event.end_ns <= last + slack


def test_a_profile_follows_another(tmp_path: Path) -> None:
    recorder = Recorder(rank=3)
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        recorder.begin(order(folder))
        with recorder.range(name):
            multiply()
        recorder.end()
    recorder.join()
    for name in ("one", "two"):
        trace = read_trace(tmp_path / name / "rank-3.trace.json.gz", 3)
        assert {item.name for item in trace.slices} & {"one", "two"} == {name}


def test_what_cannot_be_recorded_is_said_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("CUPTI is taken")

    monkeypatch.setattr(recording, "profile", refuse)
    recorder = Recorder(rank=3)
    recorder.begin(order(tmp_path))
    with recorder.range("verify"):
        multiply()
    recorder.end()
    recorder.join()
    assert "CUPTI is taken" in done(tmp_path)["error"]
    assert not (tmp_path / "rank-3.trace.json.gz").exists()


def test_a_folder_that_is_gone_stops_nobody(tmp_path: Path) -> None:
    recorder = Recorder(rank=3)
    recorder.begin(order(tmp_path / "gone"))
    recorder.end()
    recorder.join()
    assert not recorder.is_recording


def test_memory_is_looked_at_twice(tmp_path: Path) -> None:
    recorder = Recorder(rank=3)
    recorder.begin(order(tmp_path, "MEM"))
    recorder.end()
    recorder.end()
    recorder.join()
    memory = json.loads((tmp_path / "rank-3.memory.json").read_text())
    assert set(memory) == {"begin", "end"}
    assert all(moment["resident_bytes"] > 1 << 20 for moment in memory.values())


class Ranks:
    """What the other ranks were told."""

    def __init__(self) -> None:
        self.told: list[ProfileOrder | None] = []

    def profile(self, order: ProfileOrder | None) -> None:
        self.told.append(order)


def test_the_driver_counts_for_all(tmp_path: Path) -> None:
    recorder, ranks, ends = Recorder(rank=0), Ranks(), list[int]()
    session = ProfileSession(recorder, ranks)  # type: ignore[arg-type]
    session.stepped(time.time_ns())
    session.settle()
    wanted = order(tmp_path, "MEM", num_steps=2)
    session.begin(wanted, ends.append)
    assert session.is_open and ranks.told == [wanted]
    for _ in range(2):
        assert ends == []
        session.stepped(time.time_ns())
        session.settle()
    assert ends == [2] and ranks.told == [wanted, None] and not recorder.is_recording
    session.settle()
    session.end()
    recorder.join()
    assert ends == [2] and len(ranks.told) == 2
    names = [name for name, *_ in read_json(tmp_path / "rank-0.spans.json")]
    assert names == ["step 1", "step 2"]


def test_steps_beside_a_begin_and_an_end_may_take_long(tmp_path: Path) -> None:
    recorder = Recorder(rank=0)
    session = ProfileSession(recorder, Ranks())  # type: ignore[arg-type]
    allowed = []
    for step in range(10):
        if step == 2:
            session.begin(order(tmp_path, "MEM", num_steps=4), lambda steps: None)
        allowed.append(session.allowance_s == ALLOWANCE_S)
        session.stepped(time.time_ns())
        session.settle()
    recorder.join()
    assert allowed == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2
