"""Shared set-up: quiet Ray, few threads, no hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ranks of a test gang are many on few cores: they import kdray from here, with one thread each.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
)

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# The suite is deterministic: the same examples every time, and no verdict hangs on a clock.
settings.register_profile(
    "kdray",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kdray")


# Folders whose tests start clusters, ranks and servers: one after another, however many workers.
PROCESSES = ("actors", "jobs", "profiling", "serve")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers (make test) a file stays with one of them, as its fixtures do."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        group = "processes" if folder in PROCESSES else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test, with its fixtures, draws the same numbers whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with room for eight ranks, for the whole test run."""
    import ray

    from kdray.actors.cluster import connect

    connect(min_cpus=9)
    yield
    ray.shutdown()
