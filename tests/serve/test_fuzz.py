"""Whatever JSON a body holds, the answer is 200 or 400, never a failure of the server."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdray.model.tokenizer import Tokenizer
from kdray.serve.app import ServeLimits, build_app
from kdray.serve.schema import CHAT_BODY, COMPLETION_BODY
from tests.serve.fakes import FakeEngine, steps
from tests.serve.http import call

ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 300)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, 1e308, -0.0, 2**63, "\ud800", "NaN"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=6,
)
CONTENT = st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), ODD)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": ODD})


def names(body: dict[str, Any]) -> list[str]:
    schema = body["requestBody"]["content"]["application/json"]["schema"]
    return [name for name in schema["properties"] if name != "model"]


CHAT = st.fixed_dictionaries(
    {"messages": st.lists(CONTENT | MESSAGE, max_size=3) | ODD}
) | st.dictionaries(st.sampled_from(names(CHAT_BODY)), ODD, max_size=4).map(
    lambda members: {"messages": [{"role": "user", "content": "hi"}]} | members
)
COMPLETION = st.dictionaries(st.sampled_from(names(COMPLETION_BODY)), ODD, max_size=5).map(
    lambda members: {"prompt": "hi"} | members
)


def status(tokenizer: Tokenizer, path: str, body: bytes) -> int:
    limits = ServeLimits(max_choices=4)
    app = build_app(FakeEngine(steps("a", "b")), tokenizer, "fake", limits)
    response = call(app, "POST", path, content=body)
    if response.status_code != 200:
        assert set(response.json()) == {"error"}
    return response.status_code


quick = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(body=CHAT)
def test_any_chat(tokenizer: Tokenizer, body: Any) -> None:
    assert status(tokenizer, "/v1/chat/completions", json.dumps(body).encode()) in (200, 400)


@quick
@given(body=COMPLETION)
def test_any_completion(tokenizer: Tokenizer, body: Any) -> None:
    assert status(tokenizer, "/v1/completions", json.dumps(body).encode()) in (200, 400)


@quick
@given(body=st.binary(max_size=40) | ODD.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(tokenizer: Tokenizer, body: bytes) -> None:
    assert status(tokenizer, "/v1/completions", body) == 400
