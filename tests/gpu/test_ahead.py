"""Captured rounds on a GPU: the tokens of steps from the host, and of plain decoding."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from jobs.traffic import Reply, Visit, demo_prompts, draw_visits, run_visits
from kdray.config import EngineConfig
from kdray.engine import build_engine, resolve
from kdray.kernels.cuda_round import CudaRoundOps
from tests.gpu.near_ties import check_same
from tests.kernels.round_cases import check_round

pytestmark = pytest.mark.gpu

COUNT = 120


@pytest.fixture(scope="module")
def visits(device: torch.device) -> list[Visit]:
    prompts = demo_prompts(resolve(EngineConfig(device="cuda")))
    return list(islice(draw_visits(prompts, seed=7, most_tokens=64), COUNT))


@pytest.fixture(scope="module")
def plainly(visits: list[Visit]) -> list[Reply]:
    return replies_of(visits, mode="plain", graphs=False)


def replies_of(visits: list[Visit], **wishes: object) -> list[Reply]:
    config = EngineConfig(device="cuda", dtype="float32", **wishes)  # type: ignore[arg-type]
    engine = build_engine(config, resolve(config))
    replies = run_visits(engine.driver, engine.facts, visits)
    assert engine.driver.scheduler.pages.num_used == 0
    return replies


@pytest.mark.parametrize("wishes", [
    {"budget": 16}, {"budget": 31, "max_requests": 5}, {"mode": "chain", "budget": 7},
    {"mode": "plain"}, {"budget": 16, "page_size": 1, "num_pages": 2100}, {"max_requests": 1},
    {"budget": 16, "graphs": False},
], ids=str)  # fmt: skip
def test_captured_rounds_write_what_plain_decoding_writes(
    visits: list[Visit], plainly: list[Reply], wishes: dict[str, object]
) -> None:
    replies = replies_of(visits, **wishes)
    for visit, mine, other in zip(visits, replies, plainly, strict=True):
        check_same(visit, mine, other)


@pytest.mark.parametrize("seed", range(20))
def test_the_rounds_ops_equal_the_reference(seed: int, device: torch.device) -> None:
    check_round(CudaRoundOps(device), seed, device)
