"""Ranks in processes of their own: one that fails ends the job, whatever rank 0 waits for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).resolve().parents[2] / "jobs"
SCRIPT = """
import sys, time
sys.path[:0] = [{jobs!r}, {root!r}]
from step_ranks import ranks_beside

def be_rank(rank, port, ends):
    if rank == 2:
        raise SystemExit(ends)
    time.sleep(600 if ends else 0)

if __name__ == "__main__":
    with ranks_beside(3, be_rank, {ends}):
        time.sleep(600 if {waits} else 0)
    print("all ended")
"""


def run(tmp_path: Path, *, ends: int, waits: bool) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(jobs=str(JOBS), root=str(JOBS.parent), ends=ends, waits=waits))
    return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("waits", [True, False], ids=["rank 0 at work", "rank 0 done"])
def test_a_rank_that_fails_ends_the_job(tmp_path: Path, waits: bool) -> None:
    done = run(tmp_path, ends=3, waits=waits)
    assert done.returncode == 1 and "error: rank 2 failed" in done.stderr
    assert "all ended" not in done.stdout


def test_ranks_that_end_well_are_waited_for(tmp_path: Path) -> None:
    done = run(tmp_path, ends=0, waits=False)
    assert (done.returncode, done.stdout) == (0, "all ended\n"), done.stderr
