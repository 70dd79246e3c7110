"""Every error has OpenAI's shape and its own status; nothing of the framework leaks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from kdray.errors import EngineClosed, InvalidRequest, RankFailed
from kdray.serve.engine import RequestDelta
from kdray.serve.metrics import ServiceMetrics
from kdray.serve.middleware import AnswerErrors
from tests.serve.conftest import BuildApp
from tests.serve.fakes import MAX_MODEL_LEN, FakeEngine, running, steps
from tests.serve.http import call, chat, complete


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    return body["error"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_member_names_itself(app_of: BuildApp, stream: bool) -> None:
    error = error_of(chat(app_of(FakeEngine()), temperature="x", stream=stream), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", "temperature")


def test_a_body_that_is_no_json(app_of: BuildApp) -> None:
    response = call(app_of(FakeEngine()), "POST", "/v1/chat/completions", content=b"{nope")
    assert "JSON" in error_of(response, 400)["message"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/models/", "/v1/completions/"])
def test_unknown_paths(app_of: BuildApp, path: str) -> None:
    assert error_of(call(app_of(FakeEngine()), "GET", path), 404)["type"] == "invalid_request_error"


def test_the_wrong_method(app_of: BuildApp) -> None:
    response = call(app_of(FakeEngine()), "GET", "/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_another_model(app_of: BuildApp) -> None:
    app = app_of(FakeEngine())
    for response in (
        chat(app, model="gpt"),
        complete(app, model="gpt"),
        call(app, "GET", "/v1/models/gpt"),
    ):
        assert error_of(response, 404)["code"] == "model_not_found"


def test_a_body_over_the_limit(app_of: BuildApp) -> None:
    app = app_of(FakeEngine(steps("a")), max_body_bytes=100)
    assert error_of(complete(app, prompt="a" * 100), 413)["code"] == "request_too_large"
    assert complete(app, prompt="a").status_code == 200


def test_a_prompt_that_leaves_no_room(app_of: BuildApp) -> None:
    error = error_of(complete(app_of(FakeEngine()), prompt="a" * MAX_MODEL_LEN), 400)
    assert error["param"] == "prompt" and str(MAX_MODEL_LEN) in error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_fit(app_of: BuildApp, name: str) -> None:
    app = app_of(FakeEngine(steps("a")))
    error = error_of(complete(app, prompt="hi", **{name: MAX_MODEL_LEN - 1}), 400)
    assert error["param"] == name and f"at most {MAX_MODEL_LEN - 2}" in error["message"]
    assert complete(app, prompt="hi", **{name: MAX_MODEL_LEN - 2}).status_code == 200


@pytest.mark.parametrize("prompt", ["", [[]], ["a", ""]])
def test_an_empty_prompt(app_of: BuildApp, prompt: Any) -> None:
    assert error_of(complete(app_of(FakeEngine()), prompt=prompt), 400)["param"] == "prompt"


def test_too_many_choices(app_of: BuildApp) -> None:
    app = app_of(FakeEngine(steps("a")), max_choices=4)
    assert error_of(complete(app, n=5), 400)["param"] == "n"
    assert error_of(complete(app, prompt=["a"] * 5), 400)["param"] == "prompt"
    assert error_of(complete(app, prompt=["a"] * 3, n=2), 400)["param"] == "n"
    assert complete(app, prompt=["a", "b"], n=2).status_code == 200


def test_bad_template_arguments(app_of: BuildApp) -> None:
    for name in ("messages", "tokenizer", "zebra"):
        response = chat(app_of(FakeEngine(steps("a"))), chat_template_kwargs={name: 1})
        assert response.status_code in (200, 400), response.text


def test_too_many_open(app_of: BuildApp) -> None:
    app = app_of(FakeEngine(steps("a")), max_open_choices=2)
    response = complete(app, n=3)
    assert error_of(response, 429)["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) >= 1
    for _ in range(3):
        assert complete(app, n=2).status_code == 200  # what has ended is not open


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refuse", "status"),
    [
        (InvalidRequest("it can never fit", param="prompt"), 400),
        (EngineClosed("the engine is closed"), 503),
        (RankFailed("rank 2 died"), 503),
        (RuntimeError("secret detail"), 500),
    ],
)
def test_refusals_of_the_engine_keep_their_status(
    app_of: BuildApp, refuse: Exception, status: int, stream: bool
) -> None:
    engine = FakeEngine()
    engine.refuse = refuse
    response = complete(app_of(engine), stream=stream)
    message = error_of(response, status)["message"]
    assert ("secret" in message, str(refuse) in message) == (False, status != 500)
    assert ("retry-after" in response.headers) == (status == 503)


def test_an_engine_that_is_down(app_of: BuildApp, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(steps("a"))
    engine.cause = "rank 1 died"
    app = app_of(engine)
    for response in (call(app, "GET", "/health"), chat(app), complete(app, stream=True)):
        assert error_of(response, 503)["message"] == "rank 1 died"
    assert engine.submitted == []
    assert caplog.records == []  # who lost it said so, once


def test_a_fault_of_the_server_is_logged_each_time(
    app_of: BuildApp, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    engine.refuse = RuntimeError("secret detail")
    app = app_of(engine)
    for _ in range(2):
        error_of(complete(app), 500)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_a_request_that_the_engine_gives_up(app_of: BuildApp) -> None:
    failing = RequestDelta(token_ids=(), finish_reason="error", error="no finite logit")
    engine = FakeEngine(lambda i: [failing] if i == 1 else running("a"))
    assert "no finite logit" in error_of(complete(app_of(engine), n=2), 500)["message"]
    assert engine.aborted == [engine.submitted[0][0]]


def test_an_output_that_ends_too_early(app_of: BuildApp) -> None:
    engine = FakeEngine()

    async def outputs(_: str) -> Any:
        for delta in running("a"):
            yield delta

    engine.outputs = outputs  # type: ignore[method-assign]
    assert error_of(complete(app_of(engine)), 500)["code"] == "generation_failed"


def test_an_answer_that_has_begun_is_not_answered_again() -> None:
    sent: list[Any] = []

    async def application(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("too late")

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(RuntimeError, match="too late"):
        answers = AnswerErrors(application, ServiceMetrics())
        asyncio.run(answers({"type": "http"}, None, send))  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["http.response.start"]


def error_schema(operation: dict[str, Any]) -> dict[str, Any]:
    return operation["responses"]["400"]["content"]["application/json"]["schema"]  # type: ignore[no-any-return]


def test_the_description_of_the_surface_is_valid(app_of: BuildApp) -> None:
    described = call(app_of(FakeEngine()), "GET", "/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    for path, method in (("/v1/chat/completions", "post"), ("/v1/completions", "post")):
        operation = described["paths"][path][method]
        assert {"200", "400", "404", "413", "429", "500", "503"} <= set(operation["responses"])
        assert "422" not in operation["responses"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        Draft202012Validator.check_schema(schema)
        Draft202012Validator.check_schema(error_schema(operation))
    assert "HTTPValidationError" not in json.dumps(described)
