"""Joins the Ray cluster a job runs in, or starts a local one."""

from __future__ import annotations

import os
import secrets

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TASK_EVENTS_REPORT_INTERVAL_MS": "0",
    # Ray runs its workers at 15, where whatever else a machine does comes first: beside as many
    # busy processes as cores a rank got 3% of one.
    "RAY_worker_niceness": "0",
}
_OBJECT_STORE_BYTES = 100 * 1024 * 1024  # nothing of model size crosses Ray


def connect(*, min_cpus: int, min_gpus: int | None = None) -> None:
    """Join the cluster that RAY_ADDRESS names (as in `ray job submit`), else start one here.

    A local cluster offers at least min_cpus logical CPUs, so that a gang fits a small machine;
    ranks then share cores. GPUs are counted by Ray unless min_gpus says how many.
    """
    if os.environ.get("RAY_ADDRESS"):
        import ray

        ray.init(log_to_driver=False)
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" not in os.environ:
        # Ray's ports listen on every interface. A token of this process's own keeps others out, and
        # given in the environment it is not written into HOME.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    import ray

    ray.init(
        "local",  # not whatever cluster happens to run on this machine
        num_cpus=max(os.cpu_count() or 1, min_cpus),
        num_gpus=min_gpus,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
    )
