"""The engine in one process: text and messages in, text out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kdray import LLM, EngineConfig, SamplingParams
from kdray.errors import InvalidRequest
from kdray.model.chat import encode_chat

SHORT = SamplingParams(max_tokens=24)
ASKED = [{"role": "user", "content": "How much is 79 + 94?"}]
TOLD = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Tell a story about Mia and a red kite."},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(EngineConfig(device="cpu", budget=8)) as llm:
        yield llm


def test_messages_go_through_the_chat_template(llm: LLM) -> None:
    prompts = [encode_chat(llm.tokenizer, messages) for messages in (ASKED, TOLD)]
    assert llm.chat([ASKED, TOLD], SHORT) == llm.generate(prompts, SHORT)


def test_one_conversation_is_enough(llm: LLM) -> None:
    [answer] = llm.chat(ASKED, SHORT)
    assert "173" in answer.text and answer.finish_reason == "stop"
    assert answer == llm.chat([ASKED], SHORT)[0]


def test_nothing_to_say(llm: LLM) -> None:
    assert llm.chat([]) == []


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("How much is 79 + 94?", "a conversation is a list of messages"),
        (ASKED[0], "a conversation is a list of messages"),
        ([[]], "messages"),
        ([{"role": 5, "content": "x"}], "role"),
        ([{"role": "user"}], "content"),
        ([ASKED, ["What?"]], "messages"),
    ],
    ids=["text", "a message", "empty", "role", "no content", "no message"],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: object, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        llm.chat(messages, SHORT)  # type: ignore[arg-type]
    assert llm.driver.scheduler.num_waiting == 0


def test_a_prompt_is_no_list_of_planned(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="a list of prompts"):
        llm.generate("Once upon a time")
