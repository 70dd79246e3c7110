"""Keys: read from files and the environment, asked for on every route but /health."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kdray.errors import ConfigError
from kdray.serve.keys import ADMIN_KEYS_ENV, API_KEYS_ENV, KeyRing, check_bind, is_loopback
from tests.serve.conftest import BuildApp
from tests.serve.fakes import FakeEngine, steps
from tests.serve.http import call

API, OTHER, ADMIN = "key-of-alice", "key-of-bob--", "key-of-admin"
ENVIRONMENT = {API_KEYS_ENV: f"{API}, {OTHER}", ADMIN_KEYS_ENV: ADMIN}


def ring(**environment: str) -> KeyRing:
    return KeyRing.load(environment, local=False)


def bearer(key: str) -> dict[str, Any]:
    return header(f"Bearer {key}")


def header(value: str) -> dict[str, Any]:
    return {"headers": {b"Authorization": value.encode()}}


@pytest.fixture
def app(app_of: BuildApp) -> FastAPI:
    return app_of(FakeEngine(steps("a")), KeyRing.load(ENVIRONMENT, local=True))


def ask(app: FastAPI, path: str, **options: Any) -> httpx.Response:
    method = "POST" if path in ("/v1/completions", "/start_profile", "/stop_profile") else "GET"
    body = {"content": '{"prompt": "hi"}'} if path == "/v1/completions" else {}
    return call(app, method, path, **body, **options)


ROUTES = ["/v1/completions", "/v1/models", "/v1/models/fake", "/metrics", "/version",
          "/openapi.json", "/docs"]  # fmt: skip
CONTROL = ["/start_profile", "/profiles", "/profiles/p", "/profiles/p/summary.txt"]


@pytest.mark.parametrize("path", ROUTES)
def test_every_key_opens_what_serves(app: FastAPI, path: str) -> None:
    for key in (API, OTHER, ADMIN):
        assert ask(app, path, **bearer(key)).status_code == 200


@pytest.mark.parametrize("path", [*ROUTES, *CONTROL, "/nowhere"])
def test_nothing_else_opens_anything(app: FastAPI, path: str) -> None:
    wrong = [bearer(key) for key in ("key-of-carol", "", API[:-1], f"{API}x", "clé-d-Alice")]
    wrong += [{}, header(f"Basic {API}"), header(API)]
    for options in wrong:
        response = ask(app, path, **options)
        assert response.status_code == 401, options
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert error["code"] == "invalid_api_key" and API not in error["message"]


def test_health_needs_no_key(app: FastAPI) -> None:
    assert call(app, "GET", "/health").status_code == 200


@pytest.mark.parametrize("path", CONTROL)
def test_control_needs_an_admin_key(app: FastAPI, path: str) -> None:
    refused = ask(app, path, **bearer(API))
    assert refused.status_code == 403 and "admin key" in refused.json()["error"]["message"]
    assert ask(app, path, **bearer(ADMIN)).status_code == 200


@pytest.mark.parametrize("keys", [ring(), ring(**{API_KEYS_ENV: API})])
def test_without_an_admin_key_control_is_closed(app_of: BuildApp, keys: KeyRing) -> None:
    response = ask(app_of(FakeEngine(), keys), "/start_profile", **bearer(API))
    assert response.status_code == 403
    assert ADMIN_KEYS_ENV in response.json()["error"]["message"]


def test_alone_on_its_machine_without_any_key_it_is_open(app_of: BuildApp) -> None:
    app = app_of(FakeEngine(steps("a")), KeyRing.load({}, local=True))
    assert ask(app, "/v1/completions").status_code == 200
    assert ask(app, "/start_profile").status_code == 200


def test_keys_come_from_files_as_well(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{API}   # Alice\n\n{OTHER}\n")
    keys = KeyRing.load({API_KEYS_ENV: "key-of-carol"}, api_key_file=str(file), local=False)
    for key in (API, OTHER, "key-of-carol"):
        keys.check_api(f"Bearer {key}")
    assert len(keys.api) == 3 and API not in repr(keys)


@pytest.mark.parametrize("content", ["", "# nothing\n", "short\n", "two words and more\n"])
def test_files_without_good_keys_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ConfigError):
        KeyRing.load({}, api_key_file=str(file), local=False)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing.load({}, admin_key_file="/nowhere/keys", local=False)


def test_an_open_network_needs_a_key_or_leave() -> None:
    keyed = ring(**{API_KEYS_ENV: API})
    check_bind("127.0.0.1", KeyRing(), keyless=False)
    check_bind("0.0.0.0", keyed, keyless=False)
    check_bind("0.0.0.0", KeyRing(), keyless=True)
    for host in ("0.0.0.0", "::", "10.0.0.7", "box.example"):
        with pytest.raises(ConfigError, match="--keyless"):
            check_bind(host, KeyRing(), keyless=False)
    with pytest.raises(ConfigError):  # a key for control keeps nobody from generating
        check_bind("0.0.0.0", ring(**{ADMIN_KEYS_ENV: ADMIN}), keyless=False)


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "128.0.0.1")))
