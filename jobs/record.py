"""A benchmark is a record: a table row by row, one JSON at the end, a file in benchmarks/results.

Rows hold {"params", "metrics", "samples"}; units are suffixes of a metric's name; metrics are
medians of the samples beside them. Format: docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
Params = Mapping[str, str | int | float]


class Record:
    """Collects rows, printing each as it is done, and writes the file after each: a run that is
    cut short leaves what it has."""

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path | None) -> None:
        self._name = name
        self._config = dict(config)
        self._folder = folder
        self._rows: list[dict[str, Any]] = []
        self._commit = commit()  # of the code that runs, whatever is committed meanwhile
        self._created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def add(
        self,
        params: Params,
        samples: Mapping[str, Sequence[float]],
        extra: Mapping[str, float | None] | None = None,
    ) -> dict[str, float | None]:
        """One row from raw samples; `extra` are metrics without samples. Returns the metrics."""
        metrics: dict[str, float | None] = {
            name: statistics.median(values) for name, values in samples.items()
        }
        metrics |= dict(extra or {})
        row = {"params": dict(params), "metrics": metrics}
        self._rows.append(row | {"samples": {name: list(v) for name, v in samples.items()}})
        print(_line(params, metrics, samples), flush=True)
        self._write()
        return metrics

    def know(self, **facts: Any) -> None:
        """What a run finds out about itself, beside its options."""
        self._config |= facts

    def finish(self) -> None:
        """The last line of stdout: everything but the raw samples."""
        rows = [{k: row[k] for k in ("params", "metrics")} for row in self._rows]
        print(json.dumps(self._head() | {"rows": rows}))

    def _head(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "created": self._created,
            "commit": self._commit,
            "hardware": hardware(),
            "versions": versions(),
            "config": self._config,
        }

    def _write(self) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._name}-{hardware_name()}.json"
        path.write_text(as_text(self._head(), self._rows))


def as_text(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """JSON with a line a row, so that a new run shows as changed rows."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    opening = json.dumps(head, indent=1).removesuffix("\n}")
    return f'{opening},\n "rows": [\n{lines}\n]}}\n'


def hardware() -> dict[str, Any]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "gpu": torch.cuda.get_device_name(0) if gpus else None,
        "gpus": gpus,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
    }


def hardware_name() -> str:
    """The file name's part: `cpu`, `h200`, `2xh200`."""
    facts = hardware()
    if not facts["gpus"]:
        return "cpu"
    name = facts["gpu"].removeprefix("NVIDIA ").lower().replace(" ", "-")
    return name if facts["gpus"] == 1 else f"{facts['gpus']}x{name}"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "ray", "transformers", "cupy-cuda13x"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that ran, with a + where the tree was changed; "unknown" outside a checkout.

    $KDRAY_COMMIT goes first: for a copy of the files whose history stayed behind.
    """
    if told := os.environ.get("KDRAY_COMMIT"):
        return told
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--", "kdray", "jobs") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _line(
    params: Params,
    metrics: Mapping[str, float | None],
    samples: Mapping[str, Sequence[float]],
) -> str:
    cells = [f"{key} {value}" for key, value in params.items()]
    for name, value in metrics.items():
        text = "-" if value is None else f"{value:.4g}"
        spread = samples.get(name, ())
        if len(spread) > 1:
            text += f" ({min(spread):.4g} to {max(spread):.4g})"
        cells.append(f"{name} {text}")
    return "  ".join(cells)
