"""The chaos job's plan and its verdict; the run itself is a job of minutes."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from chaos import Outcome, judge
from chaos_faults import Fault, planned_faults
from chaos_load import Reply, request_lines
from record import Record

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams

SAID = Reply("once", (1, 2), "length", 2, None)
ALL_FAULTS = list(islice(planned_faults(), 8))


def verdict(tmp_path: Path, replies: dict[int, Reply], faults: list[Fault] = ALL_FAULTS) -> bool:
    peaceful = Outcome({1: SAID, 2: SAID}, [])
    return judge(peaceful, Outcome(replies, faults), Record("chaos", {}, tmp_path))


def test_a_run_has_two_hangs_and_one_dead_driver_among_its_killed_ranks() -> None:
    faults = list(islice(planned_faults(), 40))
    assert [fault.rank for fault in faults if fault.kind == "hang"] == [1, 0]
    assert [fault.rank for fault in faults if fault.kind == "driver killed"] == [0]
    assert sum(fault == Fault("rank killed", 1) for fault in faults) == 37


def test_the_same_outputs_are_good_and_anything_else_is_not(tmp_path: Path) -> None:
    assert verdict(tmp_path, {2: SAID, 1: SAID})
    assert not verdict(tmp_path, {1: SAID})
    assert not verdict(tmp_path, {1: SAID, 2: replace(SAID, text="twice")})
    assert not verdict(tmp_path, {1: SAID, 2: replace(SAID, completion_tokens=3)})
    assert not verdict(tmp_path, {1: SAID, 2: replace(SAID, error="gone")})


def test_a_run_without_all_its_faults_proves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not verdict(tmp_path, {1: SAID, 2: SAID}, ALL_FAULTS[:3])
    assert "too short" in capsys.readouterr().err


def test_requests_are_of_all_kinds_and_fit_the_model() -> None:
    config = EngineConfig(device="cpu")
    lines = list(islice(request_lines(config, seed=7, most_tokens=300), 200))
    for line in lines:
        sampling = {k: v for k, v in line.body.items() if k not in ("prompt", "stop", "logit_bias")}
        SamplingParams(**sampling)
        assert len(line.body["prompt"]) + line.body["max_tokens"] <= 2048
    for kind in ("stop", "temperature", "logit_bias", "top_k", "min_p", "presence_penalty"):
        assert {bool(line.body[kind]) for line in lines} == {True, False}
