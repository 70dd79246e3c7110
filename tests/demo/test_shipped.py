"""The shipped demo: its files, its text, and that the product computes what its training did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kdray import LLM, EngineConfig, SamplingParams
from kdray.demo import drafter_path, target_path
from kdray.demo.text import KINDS, Document, check_answer, held_out_prompts
from kdray.demo.tokenizer import DemoTokenizer, load_tokenizer
from kdray.demo.training.drafter import DemoDrafter
from kdray.demo.training.generation import GeneratedTexts, Sampling, generate
from kdray.demo.training.replay import replay
from kdray.demo.training.restore import load_drafter, load_target
from kdray.demo.training.target import DemoTarget
from kdray.model.chat import encode_chat

PER_KIND = 2


@dataclass(frozen=True)
class Demo:
    """The shipped models in the training's own modules, and their greedy texts."""

    tokenizer: DemoTokenizer
    target: DemoTarget
    drafter: DemoDrafter
    documents: list[Document]
    prompts: list[list[int]]
    texts: GeneratedTexts


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(target_path())
    target = load_target(target_path())
    drafter = load_drafter(drafter_path(), target, tokenizer)
    documents = [d for kind in KINDS for d in held_out_prompts(kind, PER_KIND, seed=23)]
    prompts = [tokenizer.encode_prompt(document.prompt_turns) for document in documents]
    sampling = Sampling(torch.zeros(len(prompts)), 448)
    texts = generate(target, prompts, sampling, tokenizer)
    yield Demo(tokenizer, target, drafter, documents, prompts, texts)
    torch.set_num_threads(threads)


def test_files_stay_small() -> None:
    files = [path for folder in (target_path(), drafter_path()) for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) < 24e6


def test_held_out_answers_are_right(demo: Demo) -> None:
    end_mark = demo.tokenizer.special_ids["<|im_end|>"]
    right = 0
    for row, document in enumerate(demo.documents):
        answer = demo.texts.answer(row)
        assert answer[-1] == end_mark
        right += check_answer(document.last, demo.tokenizer.decode(answer[:-1])).facts
    assert right >= len(demo.documents) - 1


def test_product_encodes_prompts_as_the_training_did(demo: Demo) -> None:
    llm = LLM(EngineConfig(model="demo", mode="plain", device="cpu", dtype="float32"))
    for document, prompt in zip(demo.documents, demo.prompts, strict=True):
        assert encode_chat(llm.tokenizer, document.prompt_messages) == prompt
    llm.close()


@pytest.mark.parametrize(("mode", "budget"), [("chain", 7), ("tree", 16)])
def test_product_accepts_what_the_replay_accepts(demo: Demo, mode: str, budget: int) -> None:
    """Two implementations of target, drafter and tree agree on every token and every round.

    One round of difference is allowed over all texts: a near tie between two drafts may fall either
    way in fp32.
    """
    config = EngineConfig(
        model="demo",
        mode=mode,  # type: ignore[arg-type]
        budget=budget,
        device="cpu",
        dtype="float32",
        max_requests=4,
        threads=1,
    )
    with LLM(config) as llm:
        completions = llm.generate(demo.prompts, SamplingParams(max_tokens=192))
    for row, completion in enumerate(completions):
        assert completion.token_ids == demo.texts.answer(row)
        # The prompt's pass gives the first token; the last step may accept past the end mark.
        assert sum(completion.accept_lengths) >= len(completion.token_ids) - 1
    replayed = replay(demo.target, demo.drafter, demo.texts, budgets=(16,), chunk=2)
    rounds = replayed[f"{mode}_{budget}"].rounds
    taken = torch.tensor([len(completion.accept_lengths) for completion in completions])
    assert int((rounds - taken).abs().sum()) <= 1, (rounds, taken)
