"""The endpoint on a real Ray Serve, in front of a real (scripted) driver actor."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import ray

from kdray.serve import deployment
from kdray.serve.arguments import Hosting
from tests.serve.drivers import FATAL, ScriptedDriver
from tests.serve.fakes import byte_tokenizer
from tests.serve.http import events, free_port, wait_until


class BusyDriver(ScriptedDriver):
    """Takes a while over an abort: Ray's cancelling of the request that sent it comes meanwhile."""

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(0.1)
        await super().abort(request_id)


@pytest.fixture(scope="module")
def driver(ray_cluster: None) -> Any:
    return ray.remote(BusyDriver).options(num_cpus=0).remote()


@pytest.fixture(scope="module")
def addresses(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of Ray Serve's proxy and of the endpoint's own port."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    ports = {"proxy": free_port(), "direct": free_port()}
    model = deployment.ServedModel(name="scripted", tokenizer_folder=folder)
    hosting = Hosting(direct_port=ports["direct"])
    deployment.start(driver, model, hosting, host="127.0.0.1", port=ports["proxy"])
    yield {door: f"http://127.0.0.1:{port}" for door, port in ports.items()}
    deployment.stop()


@pytest.fixture(scope="module", params=["proxy", "direct"])
def address(addresses: dict[str, str], request: pytest.FixtureRequest) -> str:
    return addresses[request.param]


def complete(address: str, prompt: str, **members: Any) -> httpx.Response:
    body = {"prompt": prompt} | members
    return httpx.post(f"{address}/v1/completions", json=body, timeout=60)


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=60)


def test_a_whole_completion(address: str) -> None:
    answer = complete(address, "hello").json()
    assert answer["choices"][0]["text"] == "hello"
    assert answer["usage"]["kdray"] == {"accept_length_mean": 1.5, "steps": 2}


def test_a_stream(address: str) -> None:
    chunks = events(complete(address, "hello", stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["he", "ll", "o", ""]


def test_a_refusal_by_the_driver(address: str) -> None:
    response = complete(address, "refused")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


def test_errors_of_the_framework_keep_openai_s_shape(address: str) -> None:
    for response, status in (
        (get(f"{address}/nowhere"), 404),
        (get(f"{address}/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_metrics_of_the_driver(address: str) -> None:
    assert "kdray_steps_total 12" in get(f"{address}/metrics").text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(address: str, driver: Any, stream: bool) -> None:
    aborted, endless = (len(ray.get(driver.aborted.remote())), ray.get(driver.endless.remote()))
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    body = json.dumps({"prompt": "forever", "stream": stream})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    # Who leaves before the driver has the request leaves nothing to abort.
    wait_until(lambda: ray.get(driver.endless.remote()) == endless + 1)
    if stream:
        with connection.getresponse() as response:
            assert response.read(1)
    connection.close()
    wait_until(lambda: len(ray.get(driver.aborted.remote())) == aborted + 1)


def test_a_driver_that_fails_ends_what_is_open_and_turns_the_rest_away(
    addresses: dict[str, str],
) -> None:
    """The last test of this module: the driver serves nobody afterwards."""
    failed = complete(addresses["direct"], FATAL.decode())
    assert "rank 1 died" in failed.json()["error"]["message"]
    for address in addresses.values():
        response = get(f"{address}/health")
        assert response.status_code == 503
        assert "rank 1 died" in response.json()["error"]["message"]
