"""jobs/bench_drafter.py but for its clock: what is timed drafts, at a small size, on a CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import bench_drafter
import pytest
import torch
from gpu_timing import Call

from kdray.kernels.moe_layout import PackedExperts
from kdray.model.dflash import WholeDraftMLP
from tests.model.tiny_drafter import draft_config, write_drafter


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = draft_config(intermediate_size=96)
    monkeypatch.setattr(bench_drafter, "KIMI", write_drafter(tmp_path, config))
    monkeypatch.setattr(bench_drafter, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench_drafter, "need_gpu", lambda: None)
    monkeypatch.setattr(bench_drafter, "copy_bytes_per_us", lambda: 1e6)

    def once(calls: Sequence[Call], **_: int) -> list[float]:
        return [1.0 for call in calls if call() is not NotImplemented]

    monkeypatch.setattr(bench_drafter, "graph_us", once)


def test_both_ways_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_drafter.main(["--batches", "1", "3", "--contexts", "70", "--part", "32"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["params"]["weights"] for row in rows] == ["bf16", "int4"] * 2
    wide, narrow = (row["metrics"] for row in rows[:2])
    mlps = 2 * 3 * 32 * 96  # weights
    assert wide["gb"] - narrow["gb"] == pytest.approx(1.4375 * mlps / 1e9)
    assert narrow["mlps_floor_us"] == pytest.approx(0.5625 * mlps / 1e6)
    others = 1e6 * wide["floor_us"] - 2 * mlps
    head, context, attention = 96 * 32, 2 * 70 * 2 * 2 * 16, 2 * (8 + 4) * 16 * 32
    norms = 2 * 32 + 2 * (2 * 32 + 2 * 16)
    assert others == pytest.approx(2 * (head + context + attention + norms))


def test_a_kernel_that_differs_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_drafter.dequantised

    def off(parts: PackedExperts) -> WholeDraftMLP:
        mlp = right(parts)
        return mlp._replace(down=mlp.down * 1.1)

    monkeypatch.setattr(bench_drafter, "dequantised", off)
    with pytest.raises(SystemExit, match="1 blocks differ from torch"):
        bench_drafter.main(["--batches", "1", "--contexts", "70"])
