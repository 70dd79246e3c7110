"""Engines in bfloat16 whose tokens do not depend on how they were decoded, near ties included.

Random weights make texts of near ties, so that a last bit anywhere shows in them soon.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jobs import make_checkpoint
from kdray.config import EngineConfig
from kdray.engine import build_engine, resolve
from kdray.kernels.invariant_ops import InvariantOps
from kdray.kernels.loader import KernelLoader
from kdray.model.layers import RmsNorm, laid_out
from tests.gpu.test_kv_room import WIDER

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs"))

from decode_ways import decode_on_ranks
from traffic import Reply, Visit, demo_prompts, draw_visits, run_visits

pytestmark = pytest.mark.gpu

ROWS = 300


@pytest.fixture(scope="module")
def ops(loader: KernelLoader) -> InvariantOps:
    return InvariantOps(loader.device, loader)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def check_rows(run: Callable[[slice], Tensor]) -> None:
    """run(slice of the rows) has the bits of these rows of run(all)."""
    whole = run(slice(0, ROWS))
    for first, count in ((0, 1), (7, 1), (3, 8), (60, 17), (100, 64), (90, 128), (20, 200)):
        own = slice(first, first + count)
        assert torch.equal(run(own), whole[own]), f"{count} rows"


# The kernels' sizes, and some that the library's call serves.
@pytest.mark.parametrize(
    "inputs, outputs", [(7168, 2112), (1024, 7168), (256, 7168), (512, 96), (40, 100)]
)
def test_products(ops: InvariantOps, inputs: int, outputs: int) -> None:
    x, weight = drawn(ROWS, inputs), laid_out(drawn(outputs, inputs, seed=1)) / 16
    gate_up = laid_out(drawn(2 * outputs, inputs, seed=2)) / 16
    check_rows(lambda own: ops.linear(x[own], weight))
    check_rows(lambda own: ops.linear(x[own], weight, dtype=torch.float32))
    check_rows(lambda own: ops.gated_linear(x[own], gate_up))
    check_rows(lambda own: ops.linear_and_gated(x[own], weight, gate_up, dtype=torch.float32)[0])
    check_rows(lambda own: ops.linear_and_gated(x[own], weight, gate_up)[1])
    odd = laid_out(drawn(2 * outputs + 8, inputs, seed=4)) / 16  # halves of no whole vectors
    check_rows(lambda own: ops.linear_and_gated(x[own], weight, odd)[1])
    norm = RmsNorm.of(drawn(inputs, seed=3), 1e-6)
    check_rows(lambda own: ops.norm_linear(x[own], norm, weight))


@pytest.mark.parametrize("inputs, outputs", [(128, 512), (512, 128), (24, 40)])
def test_products_a_head(ops: InvariantOps, inputs: int, outputs: int) -> None:
    x = drawn(ROWS, 8, inputs)
    weight = drawn(8, outputs, inputs, seed=1).mT
    check_rows(lambda own: ops.per_head(x[own], weight))


def engine_kinds(tmp_path: Path) -> dict[str, dict[str, object]]:
    target, drafter = str(tmp_path / "wider"), str(tmp_path / "drafter")
    words = ["--out", target, "--drafter", drafter, "--config-only", "--set", WIDER]
    assert make_checkpoint.main(words) == 0
    return {"demo": {}, "packed": {"model": target, "drafter": drafter, "load_format": "dummy"}}


def config_of(**wishes: object) -> EngineConfig:
    return EngineConfig(
        device="cuda", dtype="bfloat16", batch_invariant=True, kv_memory_bytes=1 << 29, **wishes
    )  # type: ignore[arg-type]


def visits_of(count: int, vocab: int | None = None, most_tokens: int = 64) -> list[Visit]:
    """Requests of many lengths and temperatures; none leaves."""
    if vocab is None:
        prompts = demo_prompts(resolve(EngineConfig(device="cuda")))
    else:
        prompts = [[(7 * n + 13 * i) % vocab for i in range(20 + 61 * n % 400)] for n in range(24)]
    drawn_visits = draw_visits(prompts, seed=7, most_tokens=most_tokens, leaving=0.0)
    return list(islice(drawn_visits, count))


def replies_of(config: EngineConfig, visits: list[Visit]) -> list[Reply]:
    engine = build_engine(config, resolve(config))
    replies = run_visits(engine.driver, engine.facts, visits)
    engine.driver.close()
    return replies


@pytest.mark.parametrize("kind", ["demo", "packed"])
def test_all_ways_say_the_same(device: torch.device, tmp_path: Path, kind: str) -> None:
    wishes = engine_kinds(tmp_path)[kind]
    visits = visits_of(40, 8000 if kind == "packed" else None)
    config = config_of(**wishes)
    one_by_one = replies_of(
        replace(config, mode="plain", graphs=False, max_requests=1, prefill_chunk=100), visits
    )
    assert sum(len(reply.token_ids) for reply in one_by_one) > 500
    ways = {
        "trees in graphs": config,
        "trees from the host": replace(config, graphs=False, budget=24, page_size=64),
        "chains": replace(config, mode="chain", budget=7, max_requests=5),
        "plain, together": replace(config, mode="plain"),
    }
    for name, way in ways.items():
        differing = [
            n
            for n, (a, b) in enumerate(zip(replies_of(way, visits), one_by_one, strict=True))
            if a != b
        ]
        assert not differing, f"{name}: {differing}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_say_the_same_whatever_they_run(tmp_path: Path) -> None:
    config = config_of(**engine_kinds(tmp_path)["packed"], tp=2)
    visits = visits_of(24, 8000)
    trees = decode_on_ranks(config, visits, after=nothing)
    plain = decode_on_ranks(
        replace(config, mode="plain", graphs=False, max_requests=2), visits, after=nothing
    )
    assert trees.replies == plain.replies
    assert trees.accept_length > 1


def nothing(model: object) -> None:
    pass
