"""A profile on a GPU: kernels inside captured rounds by name, memory, and the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kdray.config import EngineConfig
from kdray.core.profile import Activity, ProfileOptions, ProfileOrder
from kdray.core.request import SamplingParams
from kdray.driver.driver import Driver
from kdray.engine import build_engine, make_request, resolve
from kdray.profiling.check import problems
from kdray.profiling.merge import merge_folder
from kdray.profiling.trace import read_json

pytestmark = pytest.mark.gpu
STEPS = 6


def run(driver: Driver) -> None:
    while driver.step() is not None:
        driver.profile.settle()


def tokens_of(folder: Path | None, *activities: Activity, graphs: bool = True) -> list[int]:
    """The demo model's answer; with a folder, six steps of it are recorded into that."""
    config = EngineConfig(device="cuda", graphs=graphs, max_requests=2)
    facts = resolve(config)
    driver = build_engine(config, facts).driver
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    request = make_request("a", [5, 6, 7, 8], sampling, facts)
    driver.submit(request)
    ends: list[int] = []
    if folder is not None:
        options = ProfileOptions(num_steps=STEPS, activities=frozenset(activities))
        driver.profile.begin(ProfileOrder(options=options, folder=str(folder)), ends.append)
    run(driver)
    driver.close()
    driver.profile.join()
    assert ends == ([STEPS] if folder is not None else [])
    return request.tokens


@pytest.mark.parametrize("graphs", [True, False])
def test_kernels_have_their_names(device: torch.device, tmp_path: Path, graphs: bool) -> None:
    recorded = tokens_of(tmp_path, "CPU", "GPU", graphs=graphs)
    assert json.loads((tmp_path / "rank-0.done").read_text())["error"] is None
    merge_folder(tmp_path)
    assert problems(read_json(tmp_path / "merged.json.gz")) == []
    rows = read_json(tmp_path / "summary.json")["rank-0"]
    names = " ".join(row["kernel"] for row in rows)
    assert "build_tree" in names and "verify_attention" in names
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert recorded == tokens_of(None, graphs=graphs)


def test_allocations_are_recorded(device: torch.device, tmp_path: Path) -> None:
    tokens_of(tmp_path, "MEM")
    assert json.loads((tmp_path / "rank-0.done").read_text())["error"] is None
    assert (tmp_path / "rank-0.memory.pickle").stat().st_size > 0
    memory = json.loads((tmp_path / "rank-0.memory.json").read_text())
    assert memory["begin"]["gpu_total_bytes"] > memory["begin"]["gpu_allocated_bytes"] > 0
