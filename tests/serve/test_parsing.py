"""Request bodies: what is understood, what is ignored, what is refused and under which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kdray.core.request import SamplingParams
from kdray.errors import InvalidRequest
from kdray.serve.openai import MAX_TOKENS, CompletionRequest, parse_chat, parse_completion

VOCAB = 300
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**members: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "hi"} | members).encode(), vocab_size=VOCAB)


def refusal(raw: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(raw, vocab_size=VOCAB)
    return caught.value


def test_an_empty_ask_gets_openai_defaults() -> None:
    options = completion().options
    assert options.sampling == SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
    assert (options.max_tokens, options.choices, options.model) == (None, 1, None)
    assert not (options.stream or options.include_usage or options.continuous_usage)


SET = {
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 9,
    "min_p": 0.125,
    "presence_penalty": -1,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.25,
    "seed": 2**63 - 1,
    "ignore_eos": True,
}


def test_every_sampling_member_arrives() -> None:
    lists = {"logit_bias": {"4": -100, "2": 1.5}, "stop": ["a", "b"], "stop_token_ids": [5, 6]}
    expected = SamplingParams(
        logit_bias=((2, 1.5), (4, -100.0)), stop=("a", "b"), stop_token_ids=(5, 6), **SET
    )
    assert completion(**SET, **lists).options.sampling == expected


@pytest.mark.parametrize("name", [*SET, "n", "stop", "stream", "stream_options", "model", "echo"])
def test_null_means_absent(name: str) -> None:
    assert completion(**{name: None}) == completion()


def test_unknown_members_are_ignored() -> None:
    odd = {"user": "u", "thinking": {"type": "off"}, "reasoning_effort": "low", "zebra": [1]}
    assert completion(**odd) == completion()


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
    ],
)
def test_either_name_limits_the_tokens(members: dict[str, Any], expected: int) -> None:
    assert completion(**members).options.max_tokens == expected


def test_top_k_minus_one_is_all() -> None:
    assert completion(top_k=-1).options.sampling.top_k == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ("hi",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 0, 299], ((1, 0, 299),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [2, 3]], ("a", (2, 3))),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


def test_stream_options() -> None:
    asked = completion(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ).options
    assert asked.stream and asked.include_usage and asked.continuous_usage


def test_a_chat_keeps_its_messages_and_template_arguments() -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {"thinking": False}}
    asked = parse_chat(json.dumps(body).encode(), vocab_size=VOCAB)
    assert asked.messages == MESSAGES
    assert asked.template == {"thinking": False}


WRONG = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", "7"),
    ("max_tokens", 7.5),
    ("max_tokens", True),
    ("max_completion_tokens", 0),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 1e308),
    ("temperature", 10**400),
    ("temperature", "warm"),
    ("temperature", False),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", []),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("presence_penalty", 2.1),
    ("frequency_penalty", {}),
    ("repetition_penalty", 0),
    ("seed", -1),
    ("seed", 2**63),
    ("n", 0),
    ("n", "2"),
    ("best_of", 3),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", 1]),
    ("stop", ["a"] * 17),
    ("stop", "a" * 1001),
    ("stop", {"a": 1}),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [1] * 257),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"300": 1}),
    ("logit_bias", {"\u0661": 1}),
    ("logit_bias", {"1": "1"}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", []),
    ("ignore_eos", 1),
    ("stream", "yes"),
    ("stream_options", True),
    ("echo", 1),
    ("model", 3),
    ("prompt", None),
    ("prompt", []),
    ("prompt", [1, "a"]),
    ("prompt", ["a", 1]),
    ("prompt", [[1], [VOCAB]]),
    ("prompt", [None]),
    ("prompt", {"a": 1}),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    error = refusal(json.dumps({"prompt": "hi"} | {name: value}).encode())
    assert error.param == name
    assert len(str(error)) < 300


def test_a_nested_member_is_named_with_its_parent() -> None:
    error = refusal(b'{"prompt": "hi", "stream_options": {"include_usage": 1}}')
    assert error.param == "stream_options.include_usage"


UNSUPPORTED = [
    ("logprobs", 0),
    ("logprobs", True),
    ("top_logprobs", 5),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}),
    ("guided_json", {}),
    ("structured_outputs", {"regex": "a"}),
    ("suffix", "end"),
    ("skip_special_tokens", False),
    ("continue_final_message", True),
]
NEUTRAL = [
    ("logprobs", False),
    ("top_logprobs", 0),
    ("tools", []),
    ("tool_choice", "auto"),
    ("response_format", {"type": "text"}),
    ("modalities", ["text"]),
    ("suffix", ""),
    ("n", 1),
    ("best_of", 1),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_what_would_change_the_output_is_never_dropped(name: str, value: Any) -> None:
    error = refusal(json.dumps({"prompt": "hi", name: value}).encode())
    assert error.param == name
    assert "not supported" in str(error)


@pytest.mark.parametrize(("name", "value"), NEUTRAL)
def test_what_changes_nothing_is_fine(name: str, value: Any) -> None:
    assert completion(**{name: value}) == completion()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"hi"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "hi", "user": "\\uDC00"}',
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": Infinity}',
        b'{"prompt": "hi", "user": -Infinity}',
        b'{"prompt": "hi", "temperature": 1e999}',
        b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
    ],
)
def test_bodies_that_are_no_strict_json_object(raw: bytes) -> None:
    assert len(str(refusal(raw))) < 300


def test_a_whole_surrogate_pair_is_text() -> None:
    raw = b'{"prompt": "\\ud83d\\ude00"}'
    assert parse_completion(raw, vocab_size=VOCAB).prompts == ("\U0001f600",)


@pytest.mark.parametrize("messages", [None, [], "hi", [1], [None], {"role": "user"}])
def test_messages_must_be_objects(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(json.dumps({"messages": messages}).encode(), vocab_size=VOCAB)
    assert caught.value.param == "messages"


def test_min_tokens_beyond_max_tokens() -> None:
    assert refusal(b'{"prompt": "hi", "max_tokens": 2, "min_tokens": 3}').param == "min_tokens"


def test_a_whole_number_may_be_written_with_a_point() -> None:
    raw = b'{"prompt": "hi", "max_tokens": 7.0, "n": 2e0}'
    options = parse_completion(raw, vocab_size=300).options
    assert (options.max_tokens, options.choices) == (7, 2)
    assert type(options.max_tokens) is int
