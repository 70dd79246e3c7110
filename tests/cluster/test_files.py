"""What cluster/ ships is read by who will read it: Ray Serve, Ray's launcher, KubeRay's types."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import generate
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from kdray.actors.placement import Placement
from kdray.arguments import engine_config, placement_of
from kdray.serve.arguments import Arguments, parse_arguments
from tests.cluster.kuberay import KINDS, Manifest, RayJob, RayService

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"
MANIFESTS = sorted((CLUSTER / "kuberay").glob("*.yaml"))


def manifest_of(path: Path) -> Manifest:
    value = yaml.safe_load(path.read_text())
    manifest: Manifest = KINDS[value["kind"]].model_validate(value)
    return manifest


def arguments_of(serve_config: dict[str, Any]) -> Arguments:
    [application] = ServeDeploySchema.model_validate(serve_config).applications
    assert application.import_path == "kdray.serve.applications:build"
    return parse_arguments(application.args)


def test_the_serve_config_is_ray_serve_s_and_its_arguments_are_ours() -> None:
    config = yaml.safe_load((CLUSTER / "serve.yaml").read_text())
    arguments = arguments_of(config)
    assert arguments.config.model == "demo" and arguments.hosting.engines == 1
    assert ServeDeploySchema.model_validate(config).http_options.host == "127.0.0.1"


def test_the_lines_that_are_commented_out_are_good_as_well() -> None:
    text = (CLUSTER / "serve.yaml").read_text()
    text = text.replace("      model: demo\n", "")
    text = re.sub(r"^      # (\w+: )", r"      \1", text, flags=re.MULTILINE)
    arguments = arguments_of(yaml.safe_load(text))
    assert arguments.config.tp == 8
    assert arguments.placement == Placement(
        accelerator_type="RTX-PRO-6000", gpus=(0, 1, 2, 3, 4, 5, 6, 7)
    )
    assert arguments.placement.bundle(arguments.config) == {
        "CPU": 1, "GPU": 1, "accelerator_type:RTX-PRO-6000": 0.001,
    }  # fmt: skip


def test_the_launcher_s_config_is_ray_s() -> None:
    config = yaml.safe_load((CLUSTER / "on-prem.yaml").read_text())
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["available_node_types"]["local.cluster.node"]["max_workers"] == 1
    starts = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    for command in starts:
        assert "ray start" not in command or "RAY_AUTH_MODE=token" in command


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_has_only_fields_that_kuberay_knows(path: Path) -> None:
    cluster = manifest_of(path).cluster
    assert cluster.rayVersion == ray.__version__
    assert cluster.authOptions.mode == "token"
    for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs):
        pod = group.template.spec
        volumes = {volume.name for volume in pod.volumes}
        for container in pod.containers:
            assert {mount.name for mount in container.volumeMounts} == volumes
            assert container.resources.requests == container.resources.limits


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_s_gpus_seat_its_engine(path: Path) -> None:
    manifest = manifest_of(path)
    if isinstance(manifest, RayJob):
        words = shlex.split(manifest.spec.entrypoint)
        assert words[:2] == ["python", "/opt/kdray/jobs/generate.py"]
        options = generate.parse(words[2:])
        config, placement, ingress_cpus = engine_config(options), placement_of(options), 0.0
    else:
        arguments = arguments_of(yaml.safe_load(manifest.spec.serveConfigV2))
        config, placement = arguments.config, arguments.placement
        ingress_cpus = arguments.hosting.ingress_cpus
        assert arguments.hosting.api_key_file is not None
    [workers] = manifest.cluster.workerGroupSpecs
    [container] = workers.template.spec.containers
    limits = container.resources.limits
    assert int(limits["nvidia.com/gpu"]) == config.tp == 8
    assert int(limits["cpu"]) >= config.tp * placement.bundle(config)["CPU"] + ingress_cpus


def test_a_service_waits_for_its_drain_and_never_for_a_second_node() -> None:
    service = manifest_of(CLUSTER / "kuberay" / "rayservice.yaml")
    assert isinstance(service, RayService)
    assert service.spec.upgradeStrategy.type == "None"
    drain_s = arguments_of(yaml.safe_load(service.spec.serveConfigV2)).hosting.drain_s
    [workers] = service.cluster.workerGroupSpecs
    assert workers.template.spec.terminationGracePeriodSeconds > drain_s


@pytest.mark.parametrize("name", ["cluster/README.md", "docs/clients.md"])
def test_every_file_that_a_page_names_exists(name: str) -> None:
    page = (ROOT / name).read_text()
    names = set(re.findall(r"\b((?:cluster|jobs|docs|kdray|benchmarks)/[\w./-]+\.\w+)", page))
    assert names
    for name in names:
        assert (ROOT / name).exists(), name
