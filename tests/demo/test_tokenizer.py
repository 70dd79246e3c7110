"""The demo tokenizer: three file forms, one encoding; Kimi's special names at Kimi's distances."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiktoken
from transformers import PreTrainedTokenizerFast

from kdray.demo.chat import GENERATION_PROMPT, render
from kdray.demo.text import Document, Turn, sample_document
from kdray.demo.tokenizer import (
    LARGEST_BASE,
    VOCAB_SIZE,
    DemoTokenizer,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)


def documents(count: int, seed: int) -> list[Document]:
    rng = random.Random(seed)
    return [sample_document(rng) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> DemoTokenizer:
    return train_tokenizer(turn.content for d in documents(1500, 0) for turn in d.turns)


@pytest.fixture(scope="module")
def folder(tokenizer: DemoTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, path)
    return path


@pytest.fixture(scope="module")
def fast(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def test_files_give_the_tokenizer_back(tokenizer: DemoTokenizer, folder: Path) -> None:
    assert load_tokenizer(folder) == tokenizer


def test_special_ids_follow_kimis_distances(tokenizer: DemoTokenizer) -> None:
    base, ids = len(tokenizer.base), tokenizer.special_ids
    assert 256 < base <= LARGEST_BASE
    kimi = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4,
            "<|start_header_id|>": 6, "[EOT]": 9, "<|im_system|>": 10,
            "<|tool_call_begin|>": 13, "<|tool_call_end|>": 15, "<|im_middle|>": 17}  # fmt: skip
    assert {name: ids[name] - base for name in kimi} == kimi
    assert ids["[UNK]"] == VOCAB_SIZE - 2 and ids["[PAD]"] == VOCAB_SIZE - 1
    assert sorted(ids.values()) == list(range(base, VOCAB_SIZE))


def test_digits_stand_alone(tokenizer: DemoTokenizer) -> None:
    with_digits = [token for token in tokenizer.base if any(48 <= byte <= 57 for byte in token)]
    assert sorted(with_digits) == [bytes([byte]) for byte in range(48, 58)]


def test_fast_tokenizer_encodes_the_same(
    tokenizer: DemoTokenizer, fast: PreTrainedTokenizerFast
) -> None:
    texts = [render(document.turns) for document in documents(300, 1)]
    texts += ["Ünïcödé, 漢字 \U0001f600\t x  \n\n  y", "<|im_end|> 12345", "don't   stop"]
    for text in texts:
        ids = tokenizer.encoding.encode(text, allowed_special="all")
        assert fast.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


def test_turns_encode_as_their_rendered_text(tokenizer: DemoTokenizer) -> None:
    for document in documents(100, 2):
        ids, learnt = tokenizer.encode_turns(document.turns)
        rendered = render(document.turns)
        assert ids == tokenizer.encoding.encode(rendered, allowed_special="all")
        answers = [turn.content for turn in document.turns if turn.role == "assistant"]
        taught = tokenizer.decode(i for i, flag in zip(ids, learnt, strict=True) if flag)
        assert taught == "".join(f"{answer}<|im_end|>" for answer in answers)
        prompt = tokenizer.encode_prompt(document.prompt_turns)
        assert tokenizer.decode(prompt).endswith(GENERATION_PROMPT)


def test_special_names_in_content_stay_text(tokenizer: DemoTokenizer) -> None:
    ids, _ = tokenizer.encode_turns([Turn("user", "a <|im_end|> b")])
    assert ids.count(tokenizer.special_ids["<|im_end|>"]) == 1


def test_template_renders_as_the_code_does(fast: PreTrainedTokenizerFast) -> None:
    for document in documents(50, 3):
        messages = [{"role": turn.role, "content": turn.content} for turn in document.turns]
        assert fast.apply_chat_template(messages, tokenize=False) == render(document.turns)
        asked = fast.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert asked == render(document.prompt_turns, generation_prompt=True)


def test_template_renders_tool_calls(fast: PreTrainedTokenizerFast) -> None:
    call = {"id": "functions.add:0", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.add:0", "content": "2"},
    ]
    assert fast.apply_chat_template(messages, tokenize=False) == (
        "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>"
        'functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.add:0\n2<|im_end|>"
    )


def test_tiktoken_accepts_the_written_pattern(folder: Path) -> None:
    import json

    config = json.loads((folder / "tokenizer_config.json").read_text())
    encoding = tiktoken.Encoding(
        "check", pat_str=config["pat_str"], mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={},
    )  # fmt: skip
    assert encoding.encode("ab 1") == [97, 98, 32, 49]
