"""jobs/serve.py under faults: a stream outlives its gang; an engine given up ends the job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.model import tiny
from tests.serve.fakes import VOCAB_SIZE, byte_tokenizer
from tests.serve.http import free_port, wait_until

MARK = f"faults-of-{os.getpid()}"
JOB = Path(__file__).resolve().parents[2] / "jobs" / "serve.py"
BODY = {
    "model": "tiny",
    "prompt": "Once upon a time",
    "max_tokens": 220,
    "temperature": 0.8,
    "seed": 5,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """Two ranks with one restart to spend: the job, its address, and the file of all it says."""
    folder, said, port = tmp_path / "model", tmp_path / "said", free_port()
    folder.mkdir()
    byte_tokenizer(folder)
    config = DeepseekV3Config(**tiny.KIMI | {"vocab_size": VOCAB_SIZE, "rope_scaling": None})
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    command = [sys.executable, str(JOB), "--model", str(folder), "--device", "cpu", "--tp", "2"]
    command += ["--dtype", "float32", "--threads", "1", "--port", str(port), "--no-sample"]
    command += ["--served-name", "tiny", "--max-model-len", "256", "--faults", "max_restarts=1"]
    with said.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "KDRAY_TEST": MARK},
        )
    yield process, f"http://127.0.0.1:{port}", said
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def kill_rank_1() -> None:
    """Of this job's gang: a child of the raylet that inherited the mark."""
    raylets, ranks = set(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if b"raylet" in command and MARK.encode() in (folder / "environ").read_bytes():
                raylets.add(int(folder.name))
            if command.startswith(b"ray::VerifierActor"):
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                ranks.append((int(folder.name), int(parent)))
    [rank] = [pid for pid, parent in ranks if parent in raylets]
    os.kill(rank, signal.SIGKILL)


def stream(address: str, at_20: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """The events of one streamed completion; at_20 is called behind the 20th."""
    events: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{address}/v1/completions", json=BODY, timeout=200) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data.startswith("{"):
                events.append(json.loads(data))
                if len(events) == 20:
                    at_20()
    return events


def text(events: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def test_a_stream_outlives_its_gang_and_the_job_does_not_outlive_its_engine(
    job: tuple[subprocess.Popen[bytes], str, Path],
) -> None:
    process, address, said = job
    wait_until(lambda: "curl -sN" in said.read_text() or process.poll() is not None, 120)
    undisturbed = stream(address)
    disturbed = stream(address, kill_rank_1)
    assert text(disturbed) == text(undisturbed)
    usage = disturbed[-1]["usage"]
    assert usage["completion_tokens"] == 220
    assert usage["prompt_tokens"] == undisturbed[-1]["usage"]["prompt_tokens"]
    assert "kdray_restarts_total 1" in httpx.get(f"{address}/metrics", timeout=60).text

    broken = stream(address, kill_rank_1)
    assert text(undisturbed).startswith(text(broken[:-1]))
    assert "process of rank 1 ended" in broken[-1]["error"]["message"]
    health = httpx.get(f"{address}/health", timeout=60)
    assert health.status_code == 503
    assert "given up after 1 restarts" in health.json()["error"]["message"]
    refused = httpx.post(f"{address}/v1/completions", json=BODY, timeout=60)
    assert refused.status_code == 503
    assert process.wait(timeout=120) == 1
    lines = said.read_text()
    assert lines.count("given up") == 1
    assert lines.count("the engine was restarted (1 so far): ") == lines.count("restarted") == 1
