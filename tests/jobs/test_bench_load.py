from __future__ import annotations

import json
from pathlib import Path

import bench_load
import pytest

from tests.model.random_kimi import SET


def test_a_load_beside_a_plain_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scratch = tmp_path / "scratch"
    options = ["--make", SET, "--scratch", str(scratch), "--out", str(tmp_path), "--repeats", "1"]
    assert bench_load.main([*options, "--tp", "2", "--tp", "1"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    half, whole = (row["metrics"] for row in record["rows"])
    assert record["name"] == "load" and list(tmp_path.glob("load-*.json"))
    assert 0 < half["read_gb"] < whole["read_gb"] <= record["config"]["gb"]
    for metrics in (half, whole):
        assert metrics["plain_fraction"] == pytest.approx(metrics["gbps"] / metrics["plain_gbps"])
        assert metrics["peak_host_gb"] > 0
    written = {path: path.stat().st_mtime_ns for path in scratch.rglob("*.safetensors")}
    bench_load.main([*options, "--threads", "3"])  # by what is there
    assert written == {path: path.stat().st_mtime_ns for path in scratch.rglob("*.safetensors")}
