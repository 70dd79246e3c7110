"""jobs/generate.py as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
    assert "plain decoding" in done.stdout and "42" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "no/such/folder"), "neither"),
        (("--budget", "2000"), "budget must be an integer from 0 to 1024"),
        (("--input", "no-such.jsonl"), "no-such.jsonl"),
        (("--input", "/dev/null"), "holds no prompts"),
        (("--output", "no/such/folder/x.jsonl"), "no such folder"),
        (("--prompt", "hi", "--max-tokens", "5000"), "the most this engine takes is 2048"),
        (("--temperature", "-1"), "temperature must be between"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options: tuple[str, ...], message: str) -> None:
    done = generate(*options)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in done.stderr
