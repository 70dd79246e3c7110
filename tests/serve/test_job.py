"""jobs/serve.py as a user runs it: ready, a sample, an answer, an orderly end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.model import tiny
from tests.serve.fakes import VOCAB_SIZE, byte_tokenizer
from tests.serve.http import free_port, wait_until

MARK = f"job-of-{os.getpid()}"
JOB = Path(__file__).resolve().parents[2] / "jobs" / "serve.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that speaks bytes."""
    folder: Path = tmp_path_factory.mktemp("model")
    byte_tokenizer(folder)
    config = DeepseekV3Config(**tiny.KIMI | {"vocab_size": VOCAB_SIZE, "rope_scaling": None})
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """The running job, its port, and the file that gets all it says."""
    port, said = free_port(), tmp_path / "said"
    command = [sys.executable, str(JOB), "--model", str(model), "--device", "cpu"]
    command += ["--dtype", "float32", "--threads", "1", "--port", str(port)]
    command += ["--served-name", "tiny", "--max-model-len", "256"]
    with said.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "KDRAY_TEST": MARK},
        )
    yield process, port, said
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def live_processes() -> list[str]:
    """Command lines of what the job started, itself included: they inherit its environment."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if MARK.encode() in (folder / "environ").read_bytes():
                lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return lines


def test_it_serves_until_it_is_told_to_stop(
    job: tuple[subprocess.Popen[bytes], int, Path],
) -> None:
    process, port, said = job
    wait_until(lambda: "plain decoding" in said.read_text() or process.poll() is not None, 120)
    assert len(live_processes()) > 1  # the mark finds Ray's processes too
    assert f"curl -sN http://127.0.0.1:{port}/v1/chat/completions" in said.read_text()

    body = {"model": "tiny", "prompt": "hi", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 8

    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == 0, said.read_text()
    assert "Unhandled" not in said.read_text()  # as Ray says of answers nobody read
    wait_until(lambda: not live_processes())
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def test_a_taken_port_is_said_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, str(JOB), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}")
    assert "--port" in done.stderr and "Traceback" not in done.stderr
