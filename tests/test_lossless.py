"""Lossless means equal: tree == chain == plain, whatever the drafter, budget, batch or pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.driver.driver import Driver
from kdray.engine import EngineFacts
from kdray.kernels.ops import Ops
from kdray.model.drafter import Drafter
from tests.harness import MakeDrafter, build, drain, model_config, outputs_of, run, submit
from tests.model import tiny
from tests.oracle_drafter import OracleDrafter

DEPTH = 7
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, seed=11)
FILTERED = replace(DRAWN, temperature=1.2, top_k=20, top_p=0.9, min_p=0.02)
PENALISED = replace(
    DRAWN,
    temperature=0.0,
    presence_penalty=0.5,
    frequency_penalty=0.7,
    repetition_penalty=1.3,
    logit_bias=((7, 2.0), (9, -3.0)),
)
MIN_TOKENS = replace(GREEDY, ignore_eos=False, min_tokens=10, stop_token_ids=(3, 5, 8, 13, 21, 34))
SAMPLINGS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "filtered": FILTERED,
    "penalised": PENALISED,
    "min_tokens": MIN_TOKENS,
}
dice = random.Random(5)
PROMPTS = [[dice.randrange(3, 96) for _ in range(dice.randrange(1, 40))] for _ in range(8)]


@pytest.fixture(scope="module", params=["kimi", "deepseek"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_plain(tmp_path_factory.mktemp(request.param), request.param)


@cache
def plain(folder: Path, sampling: str) -> list[list[int]]:
    """What plain decoding says, one request at a time."""
    config = model_config(folder, page_size=1, max_requests=1)
    return run(config, PROMPTS, SAMPLINGS[sampling])[0]


def oracle(folder: Path, sampling: str, accuracy: float, seed: int = 0) -> MakeDrafter:
    """A drafter that is right with probability `accuracy` about plain decoding's text."""
    texts = plain(folder, sampling)
    sequences = {f"r{n}": [*PROMPTS[n], *text] for n, text in enumerate(texts)}

    def make(facts: EngineFacts, ops: Ops) -> Drafter:
        return OracleDrafter(
            sequences,
            depth=DEPTH,
            candidates=8,
            vocab_size=facts.model.vocab_size,
            accuracy=accuracy,
            seed=seed,
        )

    return make


def speculate(
    folder: Path,
    sampling: str,
    accuracy: float,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **wishes: object,
) -> tuple[list[list[int]], Driver]:
    config: EngineConfig = model_config(folder, **{"page_size": 16, **wishes})
    return run(config, prompts, SAMPLINGS[sampling], oracle(folder, sampling, accuracy))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("budget", [1, 8, 16, 32])
@pytest.mark.parametrize("batch", [1, 8])
def test_tree_equals_plain(folder: Path, sampling: str, budget: int, batch: int) -> None:
    outputs, _ = speculate(folder, sampling, 0.6, budget=budget, max_requests=batch)
    assert outputs == plain(folder, sampling)


@pytest.mark.parametrize("sampling", ["greedy", "drawn"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_chain_equals_plain(folder: Path, sampling: str, page_size: int, accuracy: float) -> None:
    outputs, _ = speculate(
        folder, sampling, accuracy, mode="chain", budget=7, page_size=page_size, max_requests=4
    )
    assert outputs == plain(folder, sampling)


@pytest.mark.parametrize("sampling", ["greedy", "drawn"])
@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_a_drafter_always_wrong_or_always_right_changes_nothing(
    folder: Path, sampling: str, accuracy: float
) -> None:
    outputs, driver = speculate(folder, sampling, accuracy, budget=16, max_requests=3)
    assert outputs == plain(folder, sampling)
    if accuracy == 1.0:
        assert max(driver.counters.accept_lengths) == DEPTH + 1


@pytest.mark.parametrize("sampling", ["greedy", "drawn", "penalised"])
def test_preemption_changes_nothing(folder: Path, sampling: str) -> None:
    outputs, driver = speculate(
        folder, sampling, 0.6, budget=8, page_size=4, num_pages=26, max_requests=6
    )
    assert driver.scheduler.num_preemptions > 0
    assert outputs == plain(folder, sampling)


@pytest.mark.parametrize("prefill_chunk", [1, 5, 512])
def test_chunks_of_the_prompt_change_nothing(folder: Path, prefill_chunk: int) -> None:
    outputs, _ = speculate(
        folder, "drawn", 0.6, budget=8, prefill_chunk=prefill_chunk, max_requests=4
    )
    assert outputs == plain(folder, "drawn")


def test_requests_of_different_kinds_run_side_by_side(folder: Path) -> None:
    """One batch of greedy, drawn, filtered and penalised requests, in another order."""
    kinds = [name for name in SAMPLINGS for _ in range(2)]
    prompts = [PROMPTS[n % 8] for n in range(len(kinds))]
    sequences = {
        f"r{n}": [*PROMPTS[n % 8], *plain(folder, kind)[n % 8]] for n, kind in enumerate(kinds)
    }

    def make(facts: EngineFacts, ops: Ops) -> Drafter:
        return OracleDrafter(sequences, depth=5, candidates=4, vocab_size=96, accuracy=0.7)

    engine = build(model_config(folder, budget=12, max_requests=5), make)
    requests = submit(engine, prompts, [SAMPLINGS[kind] for kind in kinds])
    drain(engine.driver)
    expected = [plain(folder, kind)[n % 8] for n, kind in enumerate(kinds)]
    assert outputs_of(requests) == expected


def test_aborting_others_changes_nothing(folder: Path) -> None:
    engine = build(
        model_config(folder, budget=8, page_size=4, max_requests=4),
        oracle(folder, "drawn", 0.6),
    )
    requests = submit(engine, PROMPTS, DRAWN)
    for n, request_id in enumerate(["r1", "r5", "r2", "r7"]):
        for _ in range(n + 1):
            engine.driver.step()
        engine.driver.abort(request_id)
    drain(engine.driver)
    kept = [0, 3, 4, 6]
    assert [outputs_of(requests)[n] for n in kept] == [plain(folder, "drawn")[n] for n in kept]


def test_a_perfect_drafter_needs_seven_times_fewer_forwards(folder: Path) -> None:
    long = replace(GREEDY, max_tokens=160)
    config = model_config(folder, max_requests=1)
    [text], plainly = run(config, PROMPTS[:1], long)

    def make(facts: EngineFacts, ops: Ops) -> Drafter:
        sequences = {"r0": [*PROMPTS[0], *text]}
        return OracleDrafter(sequences, depth=DEPTH, candidates=4, vocab_size=96)

    outputs, driver = run(config, PROMPTS[:1], long, make)
    assert outputs == [text]
    assert plainly.counters.steps >= 7 * driver.counters.steps
