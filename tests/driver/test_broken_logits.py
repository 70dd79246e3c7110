"""A request whose logits are all NaN ends alone, with its id; nobody beside it notices."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.driver.scheduler import RequestOutput
from kdray.engine import Engine, EngineFacts, build_engine, make_request, resolve
from kdray.kernels.ops import Ops
from kdray.llm import LLM
from kdray.model.drafter import Drafter
from tests.harness import build, drain, model_config, outputs_of, run, submit
from tests.model import tiny
from tests.oracle_drafter import OracleDrafter

POISON = 90  # a token whose embedding is NaN
SOUND = [[5, 6, 7, 8, 9], [10] * 21, [3, 4]]
BROKEN = [11, 12, POISON, 13]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, logit_bias=((POISON, -100.0),))
PENALISED = replace(GREEDY, temperature=0.7, seed=4, presence_penalty=0.5, min_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_plain(tmp_path_factory.mktemp("tiny"))


def poison(engine: Engine) -> Engine:
    model = engine.driver.verifiers._verifier.model  # type: ignore[attr-defined]
    model.embedding[POISON] = math.nan
    return engine


def errors(outputs: list[RequestOutput]) -> dict[str, str | None]:
    return {o.request_id: o.error for o in outputs if o.finish_reason == "error"}


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("speculates", [False, True])
def test_it_fails_alone_in_planned_rounds(
    folder: Path, sampling: SamplingParams, speculates: bool
) -> None:
    config = model_config(folder, page_size=4, max_requests=4, budget=8, num_pages=60)
    expected, _ = run(config, SOUND, sampling)

    def oracle(facts: EngineFacts, ops: Ops) -> Drafter:
        texts = {f"r{n}": [*SOUND[n], *text] for n, text in enumerate(expected)}
        return OracleDrafter(texts, depth=5, candidates=4, vocab_size=96, accuracy=0.6)

    engine = poison(build(config, oracle if speculates else None))
    requests = submit(engine, SOUND, sampling)
    engine.driver.submit(make_request("bad", BROKEN, sampling, engine.facts))
    outputs = [output for step in iter(engine.driver.step, None) for output in step]
    assert outputs_of(requests) == expected
    assert list(errors(outputs)) == ["bad"]
    assert "request bad: no finite logit" in str(errors(outputs)["bad"])
    assert engine.driver.scheduler.pages.num_used == 0


def test_pages_that_held_broken_values_serve_the_next(folder: Path) -> None:
    config = model_config(folder, page_size=4, max_requests=1, num_pages=12)
    expected, _ = run(config, SOUND, GREEDY)
    engine = poison(build(config))
    engine.driver.submit(make_request("bad", [POISON] * 30, GREEDY, engine.facts))
    requests = submit(engine, SOUND, GREEDY)
    drain(engine.driver)
    assert outputs_of(requests) == expected


@pytest.mark.parametrize("ahead", [False, True])
def test_it_fails_alone_in_rounds_of_the_demo_model(ahead: bool) -> None:
    config = EngineConfig(device="cpu", max_requests=3, max_model_len=96, budget=8)
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [list(range(100, 120)), list(range(300, 305))]
    facts = resolve(config)

    def outputs(*, with_poison: bool) -> tuple[list[list[int]], dict[str, str | None]]:
        engine = build_engine(config, facts, runs_ahead=ahead)
        requests = submit(engine, prompts, sampling)
        if with_poison:
            poison(engine)
            engine.driver.submit(make_request("bad", [7, POISON, 8], sampling, facts))
        steps = [output for step in iter(engine.driver.step, None) for output in step]
        assert engine.driver.scheduler.pages.num_used == 0
        return outputs_of(requests), errors(steps)

    expected, none = outputs(with_poison=False)
    assert none == {} and not any(POISON in text for text in expected)
    found, broken = outputs(with_poison=True)
    assert found == expected and list(broken) == ["bad"]


def test_a_completion_says_why_it_ended() -> None:
    with LLM(EngineConfig(device="cpu", mode="plain", max_model_len=64)) as llm:
        llm.driver.verifiers._verifier.model.embedding[POISON] = math.nan  # type: ignore[attr-defined]
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        bad, good = llm.generate([[POISON, 5], [100, 101]], sampling)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert "no finite logit" in str(bad.error)
    assert good.finish_reason == "length" and good.error is None
