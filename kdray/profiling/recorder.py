"""One process of a gang: NVTX ranges always, and while a profile runs what it asks for.

A profile's files of rank r, written beside the steps once it has ended:

    rank-r.trace.json.gz    torch.profiler's trace, as Chrome's format has it
    rank-r.spans.json       the ranges of this process: name, start, duration (ns)
    rank-r.memory.json      memory at the begin and at the end, in bytes
    rank-r.memory.pickle    allocations for pytorch.org/memory_viz (GPU and MEM only)
    rank-r.done             written last; holds an error where something could not be recorded
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kdray.core.profile import ProfileOrder

_log = logging.getLogger(__name__)
_MEMORY_EVENTS = 200_000


@dataclass(slots=True, eq=False)
class _Recording:
    """A profile that runs in this process."""

    order: ProfileOrder
    profiler: profile | None = None
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class Recorder:
    """begin() and end() between two steps, in the thread that runs them.

    Whatever goes wrong in a recording is written to its `done` file: a profile never stops a rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._on_gpu = torch.cuda.is_available()
        self._recording: _Recording | None = None
        self._writer: threading.Thread | None = None

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """An NVTX range (about a microsecond; nothing without CUDA), and a span of a profile."""
        if self._on_gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            if self._recording is None:
                yield
            else:
                with record_function(name), self._span(name):
                    yield
        finally:
            if self._on_gpu:
                torch.cuda.nvtx.range_pop()

    def add_span(self, name: str, start_ns: int) -> None:
        """A range that began at start_ns (time.time_ns) and ends now; outside a profile nothing."""
        if self._recording is not None:
            self._recording.spans.append((name, start_ns, time.time_ns() - start_ns))

    def begin(self, order: ProfileOrder) -> None:
        """Record from here on. One profile at a time is the caller's concern."""
        self.join()
        recording = _Recording(order)
        self._recording = recording
        recording.memory["begin"] = self._memory()
        try:
            self._start(recording)
        except Exception as error:
            _log.warning("rank %d cannot record: %s", self._rank, error)
            recording.error = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """Stop recording; the files are written in a thread of their own. Idempotent."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        try:
            self._stop(recording)
        except Exception as error:
            _log.warning("rank %d cannot end its recording: %s", self._rank, error)
            recording.error = recording.error or f"{type(error).__name__}: {error}"
        recording.memory["end"] = self._memory()
        self._writer = threading.Thread(
            target=self._write, args=(recording,), name="kdray-profile-writer"
        )
        self._writer.start()

    def join(self) -> None:
        """Wait until the last profile's files are written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = time.time_ns()
        try:
            yield
        finally:
            self.add_span(name, start)

    def _start(self, recording: _Recording) -> None:
        options = recording.order.options
        if "CUDA_PROFILER" in options.activities:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            return
        if "MEM" in options.activities and self._on_gpu:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MEMORY_EVENTS)
        kinds = [ProfilerActivity.CPU] if "CPU" in options.activities else []
        if "GPU" in options.activities and self._on_gpu:
            kinds.append(ProfilerActivity.CUDA)
        if kinds:
            recording.profiler = profile(
                activities=kinds,
                with_stack=options.with_stack,
                record_shapes=options.record_shapes,
                profile_memory="MEM" in options.activities,
            )
            recording.profiler.start()

    def _stop(self, recording: _Recording) -> None:
        if self._on_gpu and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what was launched in the last step belongs to it
        if "CUDA_PROFILER" in recording.order.options.activities:
            torch.cuda.profiler.stop()
        if recording.profiler is not None and recording.error is None:
            recording.profiler.stop()
        if "MEM" in recording.order.options.activities and self._on_gpu:
            path = self._path(recording, "memory.pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, recording: _Recording) -> None:
        try:
            if recording.profiler is not None and recording.error is None:
                trace = self._path(recording, "trace.json.gz")
                recording.profiler.export_chrome_trace(str(trace))
            self._path(recording, "spans.json").write_text(json.dumps(recording.spans))
            self._path(recording, "memory.json").write_text(json.dumps(recording.memory, indent=1))
        except Exception as error:
            _log.warning("rank %d cannot write its profile: %s", self._rank, error)
            recording.error = f"{type(error).__name__}: {error}"
        done = self._path(recording, "done")
        partial = done.with_suffix(".partial")
        with suppress(OSError):  # the folder was removed meanwhile: nobody waits for it
            partial.write_text(json.dumps({"pid": os.getpid(), "error": recording.error}))
            partial.rename(done)  # whole or not there

    def _path(self, recording: _Recording, suffix: str) -> Path:
        return Path(recording.order.folder) / f"rank-{self._rank}.{suffix}"

    def _memory(self) -> dict[str, int]:
        found = {"resident_bytes": _resident_bytes()}
        if self._on_gpu and torch.cuda.is_initialized():
            free, total = torch.cuda.mem_get_info()
            found |= {
                "gpu_allocated_bytes": torch.cuda.memory_allocated(),
                "gpu_reserved_bytes": torch.cuda.memory_reserved(),
                "gpu_peak_bytes": torch.cuda.max_memory_allocated(),
                "gpu_free_bytes": free,
                "gpu_total_bytes": total,
            }
        return found


def _resident_bytes() -> int:
    """0 where /proc does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
