"""The shipped model through the whole engine: legible, several tokens a step, and lossless."""

from __future__ import annotations

from functools import cache

import pytest

from kdray import LLM, EngineConfig, SamplingParams
from kdray.demo.text import check_answer, held_out_prompts
from kdray.errors import InvalidRequest
from kdray.llm import Completion
from kdray.model.chat import encode_chat

DOCUMENTS = [
    document for kind in ("story", "problem", "function", "question")
    for document in held_out_prompts(kind, 2, seed=77)  # type: ignore[arg-type]
]  # fmt: skip
GREEDY = SamplingParams(max_tokens=128)
DRAWN = SamplingParams(max_tokens=128, temperature=0.8, seed=5)


def generate(sampling: SamplingParams, **wishes: object) -> list[Completion]:
    config = EngineConfig(device="cpu", threads=1, **wishes)  # type: ignore[arg-type]
    with LLM(config) as llm:
        prompts = [encode_chat(llm.tokenizer, document.prompt_messages) for document in DOCUMENTS]
        return llm.generate(prompts, sampling)


@cache
def plain(sampling: SamplingParams) -> list[list[int]]:
    done = generate(sampling, mode="plain", max_requests=1)
    return [completion.token_ids for completion in done]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", ["tree-1", "tree-8", "tree-16", "tree-32", "chain-7"])
def test_speculation_changes_no_token(
    sampling: SamplingParams, batch: int, page_size: int, mode: str
) -> None:
    name, _, budget = mode.partition("-")
    done = generate(
        sampling, mode=name, budget=int(budget), max_requests=batch, page_size=page_size
    )
    assert [completion.token_ids for completion in done] == plain(sampling)


def test_answers_are_right_and_take_several_tokens_a_step() -> None:
    done = generate(GREEDY, budget=16)
    verdicts = [
        check_answer(document.last, completion.text)
        for document, completion in zip(DOCUMENTS, done, strict=True)
    ]
    assert sum(verdict.facts for verdict in verdicts) >= len(verdicts) - 1
    lengths = [length for completion in done for length in completion.accept_lengths]
    assert sum(lengths) / len(lengths) > 3.0


def test_a_stop_string_cuts_the_text_and_frees_the_request() -> None:
    with LLM(EngineConfig(device="cpu", threads=1)) as llm:
        prompt = encode_chat(llm.tokenizer, DOCUMENTS[0].prompt_messages)
        [whole] = llm.generate([prompt], GREEDY)
        word = whole.text.split()[5]
        [cut] = llm.generate([prompt], SamplingParams(max_tokens=128, stop=(word,)))
        assert cut.text == whole.text[: whole.text.index(word)]
        assert cut.finish_reason == "stop"
        assert llm.driver.scheduler.pages.num_used == 0


def test_one_string_is_no_list_of_planned() -> None:
    with LLM(EngineConfig(device="cpu", threads=1)) as llm, pytest.raises(InvalidRequest):
        llm.generate("Once upon a time")


def test_a_small_model_in_bf16_still_speaks() -> None:
    done = generate(GREEDY, dtype="bfloat16", budget=8)
    assert all(completion.finish_reason == "stop" for completion in done)
