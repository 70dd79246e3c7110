"""The `openai` package over a real socket reads what the surface writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
from openai import OpenAI

from kdray.serve.engine import RequestDelta
from tests.serve.conftest import BuildApp
from tests.serve.fakes import FakeEngine, steps
from tests.serve.http import served

MESSAGES = [{"role": "user", "content": "hi"}]


@contextmanager
def client_of(app_of: BuildApp, engine: FakeEngine) -> Iterator[OpenAI]:
    with (
        served(app_of(engine)) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_models(app_of: BuildApp) -> None:
    with client_of(app_of, FakeEngine()) as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").owned_by == "kdray"


def test_chat(app_of: BuildApp) -> None:
    with client_of(app_of, FakeEngine(steps("h", "ello", finish="stop"))) as client:
        answer = client.chat.completions.create(model="fake", messages=MESSAGES)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 5


def test_chat_stream(app_of: BuildApp) -> None:
    with client_of(app_of, FakeEngine(steps("h", "\u00e9ll", "o"))) as client:
        stream = client.chat.completions.create(
            model="fake",
            messages=MESSAGES,  # type: ignore[arg-type]
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["h\u00e9llo"] * 2
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


def test_completion_stream(app_of: BuildApp) -> None:
    with client_of(app_of, FakeEngine(steps("a", "bc"))) as client:
        chunks = list(client.completions.create(model="fake", prompt="hi", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_errors_are_the_client_s_own(app_of: BuildApp) -> None:
    engine = FakeEngine(steps("a"))
    with client_of(app_of, engine) as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt", prompt="hi")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="fake", prompt="hi", temperature=-1)
        assert caught.value.param == "temperature"
        engine.cause = "rank 1 died"
        with pytest.raises(openai.InternalServerError, match="rank 1 died"):
            client.completions.create(model="fake", prompt="hi")


def test_an_error_in_a_stream_is_raised(app_of: BuildApp) -> None:
    failing = RequestDelta(token_ids=(), finish_reason="error", error="rank 3 died")
    engine = FakeEngine([*steps("a", "b")[:1], failing])
    with client_of(app_of, engine) as client:
        stream = client.completions.create(model="fake", prompt="hi", stream=True)
        with pytest.raises(openai.APIError, match="rank 3 died"):
            list(stream)
