"""Profiles over HTTP, as SGLang's and vLLM's clients ask for them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kdray.core.profile import DEFAULT_STEPS
from kdray.serve.keys import KeyRing
from tests.serve.conftest import BuildApp
from tests.serve.fakes import FakeEngine
from tests.serve.http import call


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(app_of: BuildApp, engine: FakeEngine) -> FastAPI:
    return app_of(engine, KeyRing(open_control=True))


def start(app: FastAPI, body: Any = None) -> httpx.Response:
    content = b"" if body is None else json.dumps(body).encode()
    return call(app, "POST", "/start_profile", content=content)


def test_without_a_body(app: FastAPI, engine: FakeEngine) -> None:
    assert start(app).json() == {"id": "p", "state": "recording", "ignored": []}
    assert engine.profiles.options is not None
    assert engine.profiles.options.num_steps == DEFAULT_STEPS
    assert engine.profiles.options.activities == frozenset()


def test_as_sglang_s_clients_ask(app: FastAPI, engine: FakeEngine) -> None:
    body = {
        "output_dir": "/etc/cron.d",
        "num_steps": 5,
        "activities": ["CPU", "MEM"],
        "with_stack": True,
        "record_shapes": None,
        "profile_by_stage": False,
        "merge_profiles": True,
    }
    answer = start(app, body).json()
    assert answer["ignored"] == ["output_dir", "profile_by_stage", "merge_profiles"]
    options = engine.profiles.options
    assert options is not None and options.num_steps == 5 and options.with_stack
    assert options.activities == {"CPU", "MEM"} and not options.record_shapes


def test_as_vllm_s_client_asks(app: FastAPI) -> None:
    assert start(app, {"model": "m", "prompt": "hi", "max_tokens": 9}).status_code == 200
    assert call(app, "POST", "/stop_profile").json()["state"] == "done"


@pytest.mark.parametrize(
    "body",
    [
        {"num_steps": 0},
        {"num_steps": 10**6},
        {"num_steps": "five"},
        {"activities": "CPU"},
        {"activities": ["TPU"]},
        {"activities": [["CPU"]]},
        {"activities": ["CUDA_PROFILER", "CPU"]},
        {"with_stack": 1},
        [],
    ],
)
def test_wrong_wishes(app: FastAPI, engine: FakeEngine, body: Any) -> None:
    assert start(app, body).status_code == 400
    assert engine.profiles.options is None


def test_what_the_ranks_cannot_record(app: FastAPI) -> None:
    response = start(app, {"activities": ["GPU"]})
    assert response.status_code == 400
    assert "no GPU" in response.json()["error"]["message"]


def test_one_at_a_time(app: FastAPI) -> None:
    assert call(app, "POST", "/stop_profile").status_code == 409
    assert start(app).status_code == 200
    response = start(app)
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "profile_conflict"


def test_profiles_are_found_again(app: FastAPI) -> None:
    assert call(app, "GET", "/profiles").json()["data"] == ["p"]
    assert call(app, "GET", "/profiles/p").json()["state"] == "done"
    for file, kind in (("summary.txt", "text/plain"), ("summary.json", "application/json"),
                       ("merged.json.gz", "application/octet-stream")):  # fmt: skip
        response = call(app, "GET", f"/profiles/p/{file}")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kind)


@pytest.mark.parametrize(
    "path",
    ["q", "p/nothing", "../etc", "..", "p/..%2f..%2fetc%2fpasswd", "%2e%2e/passwd", "p/../../etc"],
)
def test_other_names_are_not_there(app: FastAPI, path: str) -> None:
    assert call(app, "GET", f"/profiles/{path}").status_code == 404


def test_a_large_body(app: FastAPI) -> None:
    assert start(app, {"prompt": "a" * (1 << 20)}).status_code == 413
