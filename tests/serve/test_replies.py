"""Response objects without streaming, and which engine requests they came from."""

from __future__ import annotations

from typing import Any

import pytest

from kdray.model.tokenizer import Tokenizer
from kdray.serve.app import build_app
from tests.serve.conftest import BuildApp
from tests.serve.fakes import IM_END, MAX_MODEL_LEN, FakeEngine, steps
from tests.serve.http import call, chat, complete


def test_a_chat_completion(app_of: BuildApp) -> None:
    engine = FakeEngine(steps("h", "ell", "o", finish="stop"))
    answer = chat(app_of(engine), model="fake").json()
    [(request_id, prompt, _)] = engine.submitted
    assert answer["id"].startswith("chatcmpl-") and request_id.startswith(answer["id"])
    assert (answer["object"], answer["model"]) == ("chat.completion", "fake")
    assert isinstance(answer["created"], int)
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 5,
        "total_tokens": len(prompt) + 5,
        "kdray": {"accept_length_mean": 2.0, "steps": 2},
    }
    assert engine.aborted == []


def test_plain_decoding_has_no_accept_length(app_of: BuildApp) -> None:
    usage = chat(app_of(FakeEngine(steps("a")))).json()["usage"]
    assert usage["kdray"] == {"accept_length_mean": None, "steps": 0}


def test_a_text_completion(app_of: BuildApp) -> None:
    engine = FakeEngine(steps("a", "b"))
    answer = complete(app_of(engine), prompt="hi").json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}
    ]
    assert engine.submitted[0][1] == list(b"hi")


PROMPTS: list[tuple[Any, list[list[int]]]] = [
    ("hi", [[104, 105]]),
    ([104, 105, 106], [[104, 105, 106]]),
    (["a", "bc"], [[97], [98, 99]]),
    ([[1], [2, 3]], [[1], [2, 3]]),
]


@pytest.mark.parametrize(("prompt", "expected"), PROMPTS)
def test_every_prompt_is_a_choice(app_of: BuildApp, prompt: Any, expected: list[list[int]]) -> None:
    engine = FakeEngine(lambda i: steps(f"out{i}"))
    answer = complete(app_of(engine), prompt=prompt).json()
    assert [submitted[1] for submitted in engine.submitted] == expected
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == [(i, f"out{i}") for i in range(len(expected))]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_n_choices_draw_with_seeds_of_their_own(app_of: BuildApp) -> None:
    engine = FakeEngine(lambda i: steps("x" * (i + 1)))
    answer = complete(app_of(engine), prompt=["a", "b"], n=2, seed=7).json()
    asked = [(bytes(prompt), sampling.seed) for _, prompt, sampling in engine.submitted]
    assert asked == [(b"a", 7), (b"a", 8), (b"b", 7), (b"b", 8)]
    assert [choice["text"] for choice in answer["choices"]] == ["x", "xx", "xxx", "xxxx"]
    assert answer["usage"]["prompt_tokens"] == 2  # each prompt once
    assert answer["usage"]["completion_tokens"] == 10


def test_without_a_seed_the_engine_draws_one(app_of: BuildApp) -> None:
    engine = FakeEngine(steps("a"))
    complete(app_of(engine), n=3)
    assert [sampling.seed for _, _, sampling in engine.submitted] == [None] * 3


@pytest.mark.parametrize(("prompt", "text"), [("hi", "hi"), ([104, 105], "hi")])
def test_echo_puts_the_prompt_in_front(app_of: BuildApp, prompt: Any, text: str) -> None:
    answer = complete(app_of(FakeEngine(steps("!"))), prompt=prompt, echo=True, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == [f"{text}!"] * 2


def test_without_max_tokens_the_model_length_is_the_limit(app_of: BuildApp) -> None:
    engine = FakeEngine(steps("a"))
    complete(app_of(engine), prompt="hi", max_tokens=None)
    assert engine.sampling.max_tokens == MAX_MODEL_LEN - 2


def test_the_token_that_ends_a_turn_ends_the_output(app_of: BuildApp, tokenizer: Tokenizer) -> None:
    engine = FakeEngine(steps("a"))
    chat(app_of(engine), stop_token_ids=[46])
    assert engine.sampling.stop_token_ids == (46, *sorted(tokenizer.end_token_ids))
    assert IM_END in engine.sampling.stop_token_ids


def test_ignore_eos_runs_past_it(app_of: BuildApp) -> None:
    engine = FakeEngine(steps("a"))
    chat(app_of(engine), ignore_eos=True)
    assert engine.sampling.stop_token_ids == ()


def test_a_stop_string_cuts_the_text_and_aborts_the_request(app_of: BuildApp) -> None:
    engine = FakeEngine(steps("one t", "wo three", " four"))
    answer = complete(app_of(engine), stop="two").json()
    assert answer["choices"][0]["text"] == "one "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("one two")
    assert engine.aborted == [engine.submitted[0][0]]


def test_a_stop_string_in_the_last_step_aborts_nothing(app_of: BuildApp) -> None:
    engine = FakeEngine(steps("one", " two three"))
    answer = complete(app_of(engine), stop=["two", "zebra"]).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert engine.aborted == []


def test_one_choice_stops_and_the_others_run_on(app_of: BuildApp) -> None:
    engine = FakeEngine(lambda i: steps("a", ".", "b") if i == 0 else steps("a", "b", "c"))
    answer = complete(app_of(engine), n=2, stop=".").json()
    assert [c["text"] for c in answer["choices"]] == ["a", "abc"]
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop", "length"]
    assert engine.aborted == [engine.submitted[0][0]]


def test_models_and_version(app_of: BuildApp) -> None:
    app = app_of(FakeEngine())
    listed = call(app, "GET", "/v1/models").json()
    [card] = listed["data"]
    assert listed["object"] == "list"
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", MAX_MODEL_LEN)
    assert card["kdray"] == {
        "mode": "tree",
        "budget": 16,
        "ranks": 1,
        "load_format": "auto",
        "synthetic_acceptance": None,
    }
    assert call(app, "GET", "/v1/models/fake").json() == card
    assert set(call(app, "GET", "/version").json()) == {"version", "ray"}


def test_health(app_of: BuildApp) -> None:
    response = call(app_of(FakeEngine()), "GET", "/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_a_name_with_slashes_is_found(tokenizer: Tokenizer) -> None:
    app = build_app(FakeEngine(), tokenizer, "org/model-1")
    assert call(app, "GET", "/v1/models/org/model-1").json()["id"] == "org/model-1"
