"""Passes over planned steps recorded as CUDA graphs, against launches of just these rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jobs import make_checkpoint
from kdray.kernels.graphs import shared_pool
from tests.gpu.test_kv_room import WIDER
from tests.verifier.step_plans import check_steps, verifiers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["demo", "packed", "packed, fp8 cache"])
def test_replays_say_what_launches_say(device: torch.device, tmp_path: Path, kind: str) -> None:
    wishes: dict[str, object] = {}
    if kind != "demo":
        target, drafter = str(tmp_path / "wider"), str(tmp_path / "drafter")
        words = ["--out", target, "--drafter", drafter, "--config-only", "--set", WIDER]
        assert make_checkpoint.main(words) == 0
        wishes = {"model": target, "drafter": drafter, "load_format": "dummy"}
        wishes |= {"dtype": "bfloat16", "kv_dtype": "fp8" if "fp8" in kind else "auto"}
    passing, launching = verifiers(device, **wishes)
    assert passing.passes is not None
    assert passing.passes.capture(shared_pool(device)) > 0
    check_steps(passing, launching, exact=kind == "demo")
    del passing, launching  # with their graphs
