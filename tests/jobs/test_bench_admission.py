"""jobs/bench_admission.py: full slots fill up by few steps of prompts, and nobody pays for it."""

from __future__ import annotations

import json
from typing import Any

import bench_admission
import pytest

REQUESTS = 48
FEW = ["--requests", str(REQUESTS), "--max-requests", "8", "--max-tokens", "48"]


def rows_of(capsys: pytest.CaptureFixture[str]) -> dict[tuple[int, str], dict[str, Any]]:
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return {(r["params"]["clients"], r["params"]["way"]): r["metrics"] for r in rows}


def test_clients_beyond_the_slots_add_tokens_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """By the modelled clock, so the figures are counts in other words."""
    assert bench_admission.main(["--clients", "8", "16", *FEW]) == 0
    rows = rows_of(capsys)
    assert len({row["tokens"] for row in rows.values()}) == 1
    once, gathered = rows[16, "at_once"], rows[16, "gather"]
    assert once["prompt_steps"] > REQUESTS / 3
    assert gathered["prompt_steps"] <= REQUESTS / 4
    assert gathered["tokens_per_s"] > 1.5 * once["tokens_per_s"]
    assert gathered["ttft_ms_p50"] < once["ttft_ms_p50"]
    assert gathered["tokens_per_s"] > rows[8, "gather"]["tokens_per_s"]


def test_who_comes_alone_never_waits(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--requests", "6", "--max-tokens", "24", "--clients", "1"]
    assert bench_admission.main(few) == 0
    rows = rows_of(capsys)
    assert rows[1, "gather"] == rows[1, "at_once"]
    assert rows[1, "gather"]["ttft_ms_p99"] == rows[1, "gather"]["ttft_ms_p50"]
