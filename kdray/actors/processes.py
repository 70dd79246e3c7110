"""The processes of a gang: who they are, and how to be sure that they are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

_POLL_S = 0.02
_MEMORY_POLL_S = 0.5
_MIB = 1 << 20
UsedMemory = Callable[[], Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One rank's process, as it knew itself before it loaded anything.

    started        its start in clock ticks since boot: a pid that is used again is not taken for it
    node_id        Ray's name of the machine it runs on
    gpu, gpu_mib   the UUID of its GPU and the memory in use there, its own context included; None
                   on a CPU
    """

    rank: int
    pid: int
    started: int
    node_id: str
    gpu: str | None = None
    gpu_mib: int | None = None


def own_process(rank: int, node_id: str, *, on_gpu: bool) -> RankProcess:
    """The calling process. On a GPU this makes its CUDA context."""
    pid = os.getpid()
    started = _started(pid)
    assert started is not None, "this process runs"
    process = RankProcess(rank=rank, pid=pid, started=started, node_id=node_id)
    if not on_gpu:
        return process
    free, total = torch.cuda.mem_get_info()
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return replace(process, gpu=uuid, gpu_mib=(total - free) // _MIB)


def end_processes(
    processes: Sequence[RankProcess],
    timeout_s: float,
    *,
    grace_s: float = 0.0,
    used_memory: UsedMemory | None = None,
) -> list[str]:
    """Wait grace_s for them to end, kill what still runs, and wait until it is gone.

    On the machine of the caller. SIGKILL ends a stopped process too, and one in the kernel as soon
    as it comes out. Returns in words what was not gone after timeout_s: a process, or memory of a
    GPU.
    """
    for process in _wait(processes, time.monotonic() + grace_s):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    left = _wait(processes, deadline)
    said = [f"process {p.pid} of rank {p.rank} does not end" for p in left]
    return said + _wait_for_memory(processes, deadline, used_memory or gpu_memory_mib)


def is_alive(process: RankProcess) -> bool:
    """False for another process of the same number, and for a zombie."""
    return _started(process.pid) == process.started


def gpu_memory_mib() -> dict[str, int]:
    """UUID -> MiB in use on each GPU of this machine; empty where nvidia-smi does not say."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = (line.split(",") for line in done.stdout.splitlines() if line.strip())
    return {uuid.strip().removeprefix("GPU-"): int(used) for uuid, used in lines}


def _wait(processes: Sequence[RankProcess], deadline: float) -> list[RankProcess]:
    """Those that still run when all have ended, or at the deadline."""
    while (left := [p for p in processes if is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def _wait_for_memory(
    processes: Iterable[RankProcess], deadline: float, used_memory: UsedMemory
) -> list[str]:
    """A driver gives memory back a while after the process has gone."""
    before = {p.gpu.removeprefix("GPU-"): p.gpu_mib for p in processes if p.gpu is not None}
    while before:
        used = used_memory()
        held = {
            uuid: used[uuid]
            for uuid, mib in before.items()
            if mib is not None and used.get(uuid, 0) > mib
        }
        if not held:
            break
        if time.monotonic() >= deadline:
            return [
                f"GPU {uuid} still holds {mib} MiB, {before[uuid]} before"
                for uuid, mib in held.items()
            ]
        time.sleep(_MEMORY_POLL_S)
    return []


def _started(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None where none runs (or a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold anything
    return None if fields[0] in "ZX" else int(fields[19])
