"""jobs/profile.py: over HTTP against an endpoint, and under a name that the library has too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import profile_run
import pytest

from kdray.model.tokenizer import Tokenizer
from kdray.serve.app import build_app
from kdray.serve.keys import KeyRing
from tests.serve.fakes import FakeEngine, steps
from tests.serve.http import served

JOBS = Path(__file__).resolve().parents[2] / "jobs"
ADMIN = "key-of-admin"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(steps("a", "b"))


@pytest.fixture
def url(engine: FakeEngine, tokenizer: Tokenizer) -> Iterator[str]:
    keys = KeyRing.load({"KDRAY_ADMIN_KEYS": ADMIN}, local=True)
    with served(build_app(engine, tokenizer, "fake", None, keys)) as address:
        yield address


def profiled(url: str, out: Path, *options: str) -> int:
    return profile_run.main("", ["--url", url, "--out", str(out), "--steps", "5", *options])


def test_over_http(
    url: str,
    engine: FakeEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KDRAY_ADMIN_KEYS", f"{ADMIN}, another-key")
    del engine.profiles.files["merged.json.gz"]
    assert profiled(url, tmp_path, "--requests", "3", "--activities", "CPU", "MEM") == 0
    assert len(engine.submitted) == 2 + 3  # two to warm it
    assert (tmp_path / "p" / "summary.txt").read_bytes() == b"rank 0"
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["state"] == "done"


def test_a_key_that_is_not_known(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDRAY_ADMIN_KEYS", "key-of-carol")
    assert profiled(url, tmp_path) == 1
    assert "answered 401" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "said"),
    [("http://127.0.0.1:9", "does not answer"), ("ftp://x", "must begin with http")],
)
def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, said: str) -> None:
    assert profiled(url, tmp_path, "--requests", "0") == 1
    assert said in capsys.readouterr().err


def test_the_library_s_profile_is_still_found_from_this_folder() -> None:
    code = "import cProfile, profile; print(profile.run.__module__, profile.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=JOBS, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("profile ") and str(JOBS) not in done.stdout
