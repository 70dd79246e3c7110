"""Hundreds of bad requests to all routes, with keys and without; and what the judge sees."""

from __future__ import annotations

import asyncio
from typing import Any

import fuzz
import httpx
import pytest
from fastapi import FastAPI
from fuzz_requests import FuzzRequest, bodies, requests, values
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kdray.model.tokenizer import Tokenizer
from kdray.serve.app import ServeLimits, build_app
from kdray.serve.keys import KeyRing
from kdray.serve.schema import CHAT_BODY, COMPLETION_BODY, PROFILE_BODY
from tests.serve.fakes import FakeEngine, steps

OPEN = KeyRing(open_control=True)
KEYED = KeyRing.load({"KDRAY_API_KEYS": "key-of-alice"}, local=False)


def application(tokenizer: Tokenizer, keys: KeyRing) -> FastAPI:
    limits = ServeLimits(max_choices=4)
    return build_app(FakeEngine(steps("a", "b")), tokenizer, "demo", limits, keys)


@pytest.fixture(scope="module")
def openapi(tokenizer: Tokenizer) -> dict[str, Any]:
    return application(tokenizer, OPEN).openapi()


def answer(app: FastAPI, request: FuzzRequest) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://kdray") as client:
            return await client.request(
                request.method, request.path, content=request.body, headers=dict(request.headers)
            )

    return asyncio.run(send())


@pytest.mark.parametrize("keys", [OPEN, KEYED], ids=["open", "keyed"])
@settings(max_examples=150)
@given(data=st.data())
def test_any_request_gets_an_answer_in_shape(
    tokenizer: Tokenizer, openapi: dict[str, Any], keys: KeyRing, data: st.DataObject
) -> None:
    request = data.draw(requests(openapi))
    response = answer(application(tokenizer, keys), request)
    is_head = request.method == "HEAD"
    assert fuzz.problem_of(response.status_code, response.content, is_head=is_head) is None
    if keys is KEYED and response.status_code not in (401, 404):
        assert request.path.partition("?")[0] == "/health"


SCHEMAS = [
    body["requestBody"]["content"]["application/json"]["schema"]
    for body in (CHAT_BODY, COMPLETION_BODY, PROFILE_BODY)
]


@pytest.mark.parametrize("schema", SCHEMAS)
@settings(max_examples=50)
@given(data=st.data())
def test_values_are_what_the_schema_allows(schema: dict[str, Any], data: st.DataObject) -> None:
    Draft202012Validator(schema).validate(data.draw(values(schema)))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_bodies_are_often_wrong(schema: dict[str, Any]) -> None:
    found: set[bool] = set()

    @settings(max_examples=60)
    @given(bodies(schema))
    def look(body: bytes) -> None:
        try:
            Draft202012Validator(schema).validate(fuzz.json.loads(body))
        except Exception:
            found.add(False)
        else:
            found.add(True)

    look()
    assert found == {True, False}


@pytest.mark.parametrize(
    ("status", "body", "is_fine"),
    [
        (200, b"{}", True),
        (404, b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}', True),
        (404, b"Not Found", True),  # of the proxy
        (422, b'{"detail": []}', False),
        (404, b'{"detail": "Not Found"}', False),
        (400, b'{"error": "no"}', False),
        (500, b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}', False),
        (200, b'data: {"error":{"message":"m","type":"server_error"}}', False),
    ],
)
def test_the_judge(status: int, body: bytes, is_fine: bool) -> None:
    assert (fuzz.problem_of(status, body, is_head=False) is None) == is_fine


def test_routes_are_told_apart() -> None:
    routes = ["/v1/models", "/profiles", "/health"]
    for path, route in (
        ("/v1/models/a/b?c", "/v1/models"),
        ("/profiles/../x", "/profiles"),
        ("/health?", "/health"),
        ("/healthy", "elsewhere"),
        ("/", "elsewhere"),
    ):
        assert fuzz.route_of(path, routes) == route


def test_a_server_that_keeps_something_is_not_as_before() -> None:
    before = {"health": 200, "kdray_pages_used": 0.0}
    assert fuzz.differences(before, dict(before)) == []
    [difference] = fuzz.differences(before, before | {"kdray_pages_used": 3.0})
    assert "kdray_pages_used" in difference
