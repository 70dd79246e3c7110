"""The evaluation job and the drawing of curves, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def humaneval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    path.write_text(json.dumps({"prompt": "def add(a: int, b: int) -> int:\n"}) + "\n")
    return path


def test_evaluation_writes_a_record_and_finds_equal_texts(humaneval: Path, tmp_path: Path) -> None:
    done = run(
        "jobs/eval_demo.py", "--device", "cpu", "--threads", "1", "--per-kind", "2",
        "--budgets", "16", "--humaneval", humaneval, "--out", tmp_path,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    [path] = tmp_path.glob("eval_demo-*.json")
    record = json.loads(path.read_text())
    assert last["rows"] == [{k: row[k] for k in ("params", "metrics")} for row in record["rows"]]
    ways = [row for row in record["rows"] if row["params"]["what"] == "way"]
    assert {row["params"]["mode"] for row in ways} == {"plain", "chain", "tree"}
    assert all(row["metrics"]["texts_differing_from_plain"] == 0 for row in ways)
    trees = [row["metrics"] for row in ways if row["params"]["mode"] == "tree"]
    assert all(metrics["accept_length_all"] > 2 for metrics in trees)
    assert all("accept_length_humaneval" in metrics for metrics in trees)
    quality = [row for row in record["rows"] if row["params"]["what"] == "quality"]
    assert len(quality) == 10 and all(row["params"]["n"] == 2 for row in quality)


def test_curves_are_drawn(tmp_path: Path) -> None:
    out = tmp_path / "curves.svg"
    done = run("-m", "kdray.demo.training.curves_svg", "kdray/demo/curves.json", out)
    assert done.returncode == 0, done.stderr
    lines = ElementTree.parse(out).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    assert out.read_text() == (ROOT / "kdray/demo/curves.svg").read_text()
