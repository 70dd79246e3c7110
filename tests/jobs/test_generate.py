"""jobs/generate.py as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generate as generate_job
import pytest

ROOT = Path(__file__).resolve().parents[2]
# The job in a process that ends itself where the journal's fourth line is written.
KILLED = """
import os, signal, sys
sys.path.insert(0, "jobs")
import generate
from batch_journal import Journal

add = Journal.add

def add_and_end(self, number, record):
    add(self, number, record)
    if len(self.done) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

Journal.add = add_and_end
sys.exit(generate.main(sys.argv[1:]))
"""


def generate(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "jobs/generate.py", "--device", "cpu", "--threads", "1", *options]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=dict(os.environ)
    )


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Any]:
    return report_of(
        generate(
            "--json",
            "--tp",
            "2",
            "--max-tokens",
            "48",
            "--prompt",
            "How much is 12 + 30?",
            "--prompt",
            "Tell a story about Mia and a red kite.",
        )
    )


def test_json_says_what_happened(two_ranks: dict[str, Any]) -> None:
    assert "42" in two_ranks["texts"][0]
    assert two_ranks["generated_tokens"] == sum(map(len, two_ranks["token_ids"]))
    assert 0 < two_ranks["target_forwards"] < two_ranks["generated_tokens"]
    histogram = two_ranks["accept_length_histogram"]
    drafted = sum(histogram.values())
    mean = sum(int(n) * times for n, times in histogram.items()) / drafted
    assert two_ranks["accept_length_mean"] == pytest.approx(mean)
    assert two_ranks["stage_ms"]["verify"] > 0 and two_ranks["tokens_per_s"] > 0


def test_a_batch_from_and_to_files_equals_two_ranks(
    two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    """One rank, plain decoding and page size 1 give the tokens of two ranks with trees."""
    prompts, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "How much is 12 + 30?", "id": "sum"},
        {"messages": [{"role": "user", "content": "Tell a story about Mia and a red kite."}]},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)) + "\n")
    done = generate(
        "--input", str(prompts), "--output", str(results), "--max-tokens", "48", "--mode", "plain",
        "--page-size", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["token_ids"] for line in written] == two_ranks["token_ids"]
    assert written[0]["id"] == "sum" and written[0]["finish_reason"] == "stop"
    assert written[1]["finish_reason"] == "length" and written[1]["accept_length_mean"] is None
    assert "plain decoding" in done.stdout and "2 of 2 lines are done" in done.stderr
    again = generate("--input", str(prompts), "--output", str(results))
    assert again.returncode == 1 and "--overwrite" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.fixture
def sigterm_kept() -> Iterator[None]:
    """The job's own main handles SIGTERM, in whichever process it runs."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "no/such/folder"), "neither"),
        (("--budget", "2000"), "budget must be an integer from 0 to 1024"),
        (("--input", "no-such.jsonl"), "no-such.jsonl"),
        (("--input", "/dev/null"), "holds no prompts"),
        (("--input", __file__, "--output", "no/such/folder/x.jsonl"), "line 1 is not JSON"),
        (("--prompt", "hi", "--max-tokens", "5000"), "the most this engine takes is 2048"),
        (("--prompt", "", "--raw"), "line 1: prompt must be a string, not empty"),
        (("--gpus", "0,x"), "gpus must be numbers with commas between"),
        (("--temperature", "-1"), "temperature must be between"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    options: tuple[str, ...],
    message: str,
    sigterm_kept: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert generate_job.main(["--device", "cpu", "--threads", "1", *options]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last


def test_a_batch_that_was_killed_in_the_middle_of_a_line_goes_on(tmp_path: Path) -> None:
    """kill -9 behind four lines, the last of them cut: the whole is what was asked for."""
    prompts, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": f"How much is {n} + 30?"} for n in range(12)]
    prompts.write_text("\n".join(map(json.dumps, lines)) + "\n")
    files = ("--input", str(prompts), "--output", str(results), "--max-requests", "2")
    command = [sys.executable, "-c", KILLED, "--device", "cpu", "--threads", "1", *files]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(partial.read_bytes()[:-9])
    done = generate(*files)
    assert done.returncode == 0, done.stderr
    assert "3 of 12 lines were done before" in done.stderr
    written = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["prompt"] for line in written] == [line["prompt"] for line in lines]
    assert [str(n + 30) in line["text"] for n, line in enumerate(written)].count(True) >= 10
    assert not partial.exists()


@pytest.mark.parametrize("job", ["generate", "serve", "bench_service"])
def test_a_ctrl_c_at_the_start_ends_without_a_traceback(job: str) -> None:
    """All that takes long to import is imported where the interrupt is waited for."""
    script = (
        f"import sys; sys.path.insert(0, 'jobs'); import {job}; "
        "print(*({'ray', 'torch', 'numpy', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "", done


def test_an_interrupt_is_said_in_a_word(
    sigterm_kept: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_job, "generate", interrupted)
    assert generate_job.main(["--prompt", "hi"]) == 130
    assert capsys.readouterr().err == "stopped\n"
