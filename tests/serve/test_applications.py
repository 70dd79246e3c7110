"""What `serve run` and `serve deploy` import: arguments, placement, and a deployed engine whole."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve._private.build_app import build_app as build_serve_app

from kdray.config import EngineConfig
from kdray.errors import ConfigError
from kdray.serve import applications
from kdray.serve.arguments import Hosting, parse_arguments
from tests.actors.test_gang import wait_until_gone
from tests.serve.http import free_port


def options_of(args: dict[str, Any]) -> Any:
    """The only deployment of a built application."""
    built = build_serve_app(applications.build(args), name="kdray", default_runtime_env=None)
    [deployment] = built.deployments
    return deployment


def test_words_of_a_command_line_become_what_their_fields_want() -> None:
    arguments = parse_arguments(
        {
            "model": "/models/kimi", "tp": "4", "graphs": "false", "gpus": "3,2,1,0",
            "max_model_len": "none", "deadline_s": "2.5", "engines": "2", "served_name": "kimi",
        }
    )  # fmt: skip
    assert arguments.config == EngineConfig(model="/models/kimi", tp=4, graphs=False)
    assert arguments.placement.gpus == (3, 2, 1, 0)
    assert arguments.limits.deadline_s == 2.5
    assert (arguments.hosting.engines, arguments.hosting.served_name) == (2, "kimi")


def test_a_yaml_s_values_are_taken_as_they_are() -> None:
    arguments = parse_arguments(
        {"tp": 2, "gpus": [1, 0], "stall_s": 60, "faults": {"max_restarts": 7}}
    )
    assert arguments.placement.gpus == (1, 0)
    assert arguments.hosting.patience_s(arguments.config) == 60.0
    assert arguments.config.faults.max_restarts == 7


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"modell": "x"}, "there is no argument 'modell'; did you mean model"),
        ({"tp": "two"}, "tp must be an integer, got 'two'"),
        ({"tp": 1.5}, "tp must be an integer"),
        ({"graphs": "maybe"}, "graphs must be true or false"),
        ({"gpus": 3}, "gpus must be a list of integers"),
        ({"tp": 2, "gpus": "0,0"}, "gpus must name 2 different GPUs"),
        ({"tp": 2, "gpus": [0]}, "gpus must name 2 different GPUs"),
        ({"engines": 0}, "engines must be at least 1"),
        ({"drain_s": 0}, "drain_s must be greater than 0"),
        ({"faults": 3}, "faults must be a mapping"),
        ({"faults": {"restarts": 3}}, "there is no argument 'restarts'"),
    ],
)
def test_what_is_wrong_is_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments(args)


def test_patience_is_longer_than_a_start_unless_it_is_set() -> None:
    assert Hosting().patience_s(EngineConfig(start_timeout_s=900.0)) > 900.0


def test_an_engine_s_processes_share_one_placement_group() -> None:
    deployment = options_of(
        {"device": "cuda", "tp": 2, "accelerator_type": "H200", "engines": 3, "ingress_cpus": 2}
    )
    rank = {"CPU": 1, "GPU": 1, "accelerator_type:H200": 0.001}
    replica = deployment._replica_config
    assert replica.placement_group_bundles == [{"CPU": 2.0}, rank, rank]
    assert replica.placement_group_strategy == "STRICT_PACK"
    assert replica.ray_actor_options["num_cpus"] == 2
    assert deployment.num_replicas == 3


def test_the_bound_application_is_the_demo_on_a_cpu() -> None:
    built = build_serve_app(applications.demo, name="kdray", default_runtime_env=None)
    [deployment] = built.deployments
    assert deployment._replica_config.placement_group_bundles == [{"CPU": 1.0}, {"CPU": 1}]


def test_it_serves_drains_and_leaves_nothing(ray_cluster: None) -> None:
    port, direct_port = free_port(), free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        args = {"device": "cpu", "threads": 1, "max_requests": 2, "direct_port": direct_port}
        app = applications.build(args)
        serve.run(app, name="kdray-hosted", route_prefix="/")
        body = {"messages": [{"role": "user", "content": "How much is 12 + 30?"}], "temperature": 0}
        url = f"http://127.0.0.1:{port}"
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        assert "42" in answer["choices"][0]["message"]["content"]
        assert httpx.get(f"{url}/v1/models", timeout=120).json()["data"][0]["id"] == "demo"
        story = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        direct = f"http://127.0.0.1:{direct_port}/v1/completions"
        with httpx.stream("POST", direct, json=story, timeout=120) as told:
            lines = told.iter_lines()
            assert next(lines).startswith("data: {")
            serve.delete("kdray-hosted")  # waits for what Ray Serve has not seen come in, too
            assert "data: [DONE]" in list(lines)
    finally:
        serve.delete("kdray-hosted")
        serve.shutdown()
    wait_until_gone()
