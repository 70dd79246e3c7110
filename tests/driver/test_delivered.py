"""A request goes on behind what an engine before this one delivered, as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kdray.core.request import SamplingParams
from kdray.engine import Engine, make_request
from kdray.errors import InvalidRequest
from tests.harness import build, drain, model_config
from tests.model import tiny

PROMPT = [5, 6, 7, 8, 9, 10, 11]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLINGS = {
    "greedy": GREEDY,
    "drawn": replace(GREEDY, temperature=0.8, seed=11),
    "penalised": replace(
        GREEDY, temperature=0.9, seed=3, presence_penalty=0.5, repetition_penalty=1.3
    ),
    "min_tokens": replace(
        GREEDY, ignore_eos=False, min_tokens=10, stop_token_ids=tuple(range(3, 90, 2))
    ),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tiny.save_plain(tmp_path_factory.mktemp("tiny"))
    return build(model_config(folder, page_size=4, max_model_len=64, prefill_chunk=8))


def finish(engine: Engine, name: str, sampling: SamplingParams, delivered: list[int]) -> list[int]:
    request = make_request(name, PROMPT, sampling, engine.facts, delivered)
    engine.driver.submit(request)
    drain(engine.driver)
    return request.tokens[len(PROMPT) :]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_wherever_it_is_taken_up_the_text_is_the_same(engine: Engine, sampling: str) -> None:
    whole = finish(engine, "whole", SAMPLINGS[sampling], [])
    for cut in (1, 7, 11, len(whole) - 1):
        again = finish(engine, f"from {cut}", SAMPLINGS[sampling], whole[:cut])
        assert again == whole


def test_only_new_tokens_are_put_out(engine: Engine) -> None:
    whole = finish(engine, "whole", GREEDY, [])
    engine.driver.submit(make_request("again", PROMPT, GREEDY, engine.facts, whole[:20]))
    outputs = [output for step in iter(engine.driver.step, None) for output in step]
    assert [token for output in outputs for token in output.token_ids] == whole[20:]
    assert outputs[-1].finish_reason == "length"


def test_a_request_that_has_everything_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="24 tokens were delivered"):
        make_request("done", PROMPT, GREEDY, engine.facts, [5] * 24)


def test_delivered_tokens_are_checked_like_a_prompt(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="token ids must be from 0 to 95"):
        engine.driver.submit(make_request("odd", PROMPT, GREEDY, engine.facts, [96]))
