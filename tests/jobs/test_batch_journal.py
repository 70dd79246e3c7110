"""A journal of a batch: nothing lost and nothing twice, wherever the run before was cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_journal import Journal, fingerprint

from kdray.errors import KdrayError

RECORDS = {n: {"text": f"Zeile {n} \u2028 ✓", "n": n} for n in (3, 1, 2)}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def partial(output: Path) -> Path:
    return output.with_name("out.jsonl.partial")


def written(output: Path) -> list[Any]:
    return [json.loads(line) for line in output.read_text().split("\n")[:-1]]


def fill(output: Path, numbers: Iterator[int] | tuple[int, ...] = (3, 1, 2)) -> None:
    with Journal(output, "a") as journal:
        for number in numbers:
            journal.add(number, RECORDS[number])


def test_the_output_is_whole_and_in_order(output: Path) -> None:
    with Journal(output, "a") as journal:
        for number, record in RECORDS.items():
            assert not output.exists()
            journal.add(number, record)
        journal.finish([1, 2, 3])
    assert written(output) == [RECORDS[n] for n in (1, 2, 3)]
    assert not partial(output).exists()


def test_a_cut_at_every_byte_loses_at_most_the_line_it_hit(output: Path) -> None:
    fill(output)
    whole = partial(output).read_bytes()
    ends = [n for n, byte in enumerate(whole, start=1) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        partial(output).write_bytes(whole[:cut])
        with Journal(output, "a") as journal:
            survived = max(0, sum(end <= cut for end in ends) - 1)
            assert list(journal.done) == [3, 1, 2][:survived]
            for number in (3, 1, 2):
                if number not in journal.done:
                    journal.add(number, RECORDS[number])
            assert {n: journal.record(n) for n in journal.done} == RECORDS
        assert partial(output).read_bytes() == whole


def test_a_crash_between_the_output_and_the_journal_s_end_is_harmless(output: Path) -> None:
    fill(output)
    before = partial(output).read_bytes()
    with Journal(output, "a") as journal:
        journal.finish([1, 2, 3])
    partial(output).write_bytes(before)
    with Journal(output, "a") as journal:
        assert set(journal.done) == {1, 2, 3}
        journal.finish([1, 2, 3])
    assert written(output) == [RECORDS[n] for n in (1, 2, 3)]


def test_another_batch_is_refused_and_can_replace_it(output: Path) -> None:
    fill(output, (1,))
    with pytest.raises(KdrayError, match=r"another input or other options; --overwrite"):
        Journal(output, "b").__enter__()
    with Journal(output, "b", overwrite=True) as journal:
        assert not journal.done


def test_a_finished_output_is_not_written_over_unasked(output: Path) -> None:
    output.write_text("precious\n")
    with pytest.raises(KdrayError, match="there already; --overwrite"):
        Journal(output, "a").__enter__()
    with Journal(output, "a", overwrite=True) as journal:
        assert output.read_text() == "precious\n"
        journal.add(1, RECORDS[1])
        journal.finish([1])
    assert written(output) == [RECORDS[1]]


def test_two_at_a_time_are_refused(output: Path) -> None:
    with (
        Journal(output, "a"),
        pytest.raises(KdrayError, match="another process"),
    ):
        Journal(output, "a").__enter__()


def test_a_fingerprint_tells_inputs_and_options_apart() -> None:
    prints = {
        fingerprint(lines, settings)
        for lines in ([{"prompt": "a"}], [{"prompt": "b"}])
        for settings in ({"seed": 0}, {"seed": 1})
    }
    assert len(prints) == 4
    assert fingerprint([{"a": 1, "b": 2}], {}) == fingerprint([{"b": 2, "a": 1}], {})
