"""Processes that are to go do go, stopped ones too; strangers and memory are told apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kdray.actors.processes import RankProcess, end_processes, gpu_memory_mib, is_alive, own_process

WAIT_S = 60.0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    with process:
        yield process
        process.kill()


def rank_of(child: subprocess.Popen[bytes]) -> RankProcess:
    """The child as it would describe itself."""
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    started = int(stat.rpartition(")")[2].split()[19])
    return RankProcess(rank=1, pid=child.pid, started=started, node_id="here")


def test_this_process_knows_itself() -> None:
    process = own_process(3, "here", on_gpu=False)
    assert (process.rank, process.pid, process.gpu) == (3, os.getpid(), None)
    assert is_alive(process)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_is_ended_even_where_it_is_stopped(
    child: subprocess.Popen[bytes], stopped: bool
) -> None:
    process = rank_of(child)
    if stopped:
        child.send_signal(signal.SIGSTOP)
    assert is_alive(process)
    assert end_processes([process], WAIT_S) == []
    assert not is_alive(process)
    assert child.wait() == -signal.SIGKILL


def test_another_process_of_the_same_number_is_left_alone(child: subprocess.Popen[bytes]) -> None:
    stranger = replace(rank_of(child), started=1)
    assert end_processes([stranger], WAIT_S) == []
    assert child.poll() is None


def test_memory_is_waited_for_and_what_stays_is_told(child: subprocess.Popen[bytes]) -> None:
    process = replace(rank_of(child), gpu="GPU-aa", gpu_mib=500)
    readings = iter([{"aa": 9000}, {"aa": 700}, {"aa": 480, "bb": 9000}])
    assert end_processes([process], WAIT_S, used_memory=lambda: next(readings)) == []
    assert list(readings) == []

    def never_less() -> Mapping[str, int]:
        return {"aa": 9000}

    said = end_processes([process], 0.0, used_memory=never_less)
    assert said == ["GPU aa still holds 9000 MiB, 500 before"]


def test_a_machine_without_nvidia_smi_has_no_memory_to_wait_for(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_memory_mib() == {}
    process = replace(rank_of(child), gpu="aa", gpu_mib=500)
    assert end_processes([process], WAIT_S) == []
