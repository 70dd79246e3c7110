"""Full-width layers of a rank of Kimi K2.6 through every part of their benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = 384


def rows(*words: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "jobs" / "bench_step.py"), "--replays", "3", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    return found


def test_three_layers_of_a_rank() -> None:
    found = rows(
        "--layers", "3", "--tokens", "1", "9", "33", "512", "--contexts", "0", "1024",
        "--kv-tokens", "60000", "--streams", "1", "16", "--drafts", "7", "15", "--round", "2x15",
    )  # fmt: skip
    parts = {row["params"]["part"] for row in found}
    assert parts == {"engine", "round", "draft", "step", "ops", "prediction"}
    distinct = {}
    for row in found:
        params, metrics = row["params"], row["metrics"]
        if params["part"] == "step":
            assert metrics["floor_ms"] > 0
            distinct[params["tokens"]] = metrics["distinct_experts"]
        elif params["part"] == "ops":
            assert metrics["gemm_ms"] > 0 and metrics["moe_ms"] > 0
            # A prompt's attention over no cached keys is torch's, and counts with the rest.
            assert metrics.get("attention_ms", 0) > 0 or params["way"] == "prompt"
    # Rows choose apart from one another: close to 384 (1 - (1 - 8 / 384)^T).
    assert distinct[1] == 8
    for tokens in (9, 33):
        expected = EXPERTS * (1 - (1 - 8 / EXPERTS) ** tokens)
        assert distinct[tokens] > 0.6 * expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_three_layers_over_two_gpus() -> None:
    found = rows(
        "--tp", "2", "--ranks", "2", "--layers", "3", "--tokens", "1", "9", "512",
        "--contexts", "0", "--kv-tokens", "60000", "--streams", "1", "--drafts", "7",
    )  # fmt: skip
    parts = {row["params"]["part"] for row in found}
    assert parts == {"round", "draft", "step", "ops"}
    for row in found:
        params, metrics = row["params"], row["metrics"]
        if params["part"] == "step":
            assert metrics["local_ms"] > 0 and metrics["local_distinct_experts"] >= 8
        elif params["part"] == "ops":
            assert metrics["collectives_ms"] > 0 and metrics["gemm_ms"] > 0
