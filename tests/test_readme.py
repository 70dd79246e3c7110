"""The README says what the results files say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_tables_are_those_of_the_results_files() -> None:
    done = subprocess.run([sys.executable, "benchmarks/tables.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run: python benchmarks/tables.py"


def test_every_file_it_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    jobs = re.findall(r"jobs/\w+\.py", text)
    rooms = re.findall(r"^(kdray/[\w./]+|jobs|benchmarks|docs)\s", text, re.MULTILINE)
    for name in [*links, *jobs, *rooms]:
        assert (ROOT / name.rstrip(";")).exists(), name


def test_every_room_is_on_its_map() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (ROOT / "kdray").glob("*/__init__.py")]
    for room in rooms:
        assert f"kdray/{room}" in text, room
