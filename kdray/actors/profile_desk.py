"""Profiles of one engine as others ask for them: begun, ended, merged, and found again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kdray.core.profile import ProfileOptions, ProfileOrder
from kdray.driver.step_loop import StepLoop
from kdray.errors import ProfileConflict
from kdray.profiling import merge
from kdray.profiling.store import ProfileStore

log = logging.getLogger(__name__)
State = Literal["recording", "writing", "done", "failed"]
WRITE_TIMEOUT_S = 300.0
_POLL_S = 0.1
MERGED = "merged.json.gz"


@dataclass(slots=True, eq=False)
class _Profile:
    """The profile that runs, or ran last."""

    name: str
    options: ProfileOptions
    state: State = "recording"
    steps: int = 0
    error: str | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)


class ProfileDesk:
    """One profile at a time, of all ranks. Lives in the event loop of rank 0's process.

    The ranks write their files on their own; a process of its own merges them, so that no step
    waits for that.
    """

    def __init__(self, loop: StepLoop, store: ProfileStore, ranks: int) -> None:
        self._loop = loop
        self._store = store
        self._ranks = ranks
        self._last: _Profile | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, options: ProfileOptions) -> dict[str, Any]:
        """Begin with the next step; the new profile's status. ProfileConflict: one is open."""
        last = self._last
        if last is not None and not last.finished.is_set():
            raise ProfileConflict(f"profile {last.name} is {last.state}: stop it, or wait")
        profile = _Profile(self._store.create(), options)
        order = ProfileOrder(options=options, folder=str(self._store.folder(profile.name)))
        calls = asyncio.get_running_loop()
        self._loop.begin_profile(
            order, lambda steps: _soon(calls, lambda: self._ended(profile, steps))
        )
        self._last = profile
        return self.status(profile.name)

    async def stop(self) -> dict[str, Any]:
        """End what records, and wait until its files are there; its status.

        Of a profile that has run all its steps it just tells. ProfileConflict: there was none.
        """
        profile = self._last
        if profile is None:
            raise ProfileConflict("no profile has been started")
        if profile.state == "recording":
            self._loop.end_profile()
        await profile.finished.wait()
        return self.status(profile.name)

    def status(self, name: str) -> dict[str, Any]:
        """KeyError where there is no profile of that name."""
        files = self._store.files(name)
        last = self._last
        known: dict[str, Any] = {"state": "done" if MERGED in files else "failed"}
        if last is not None and last.name == name:
            known = {"state": last.state, "steps": last.steps, "error": last.error}
        return {"id": name, "folder": str(self._store.folder(name)), "files": files} | known

    def names(self) -> list[str]:
        return self._store.names()

    def read(self, name: str, file: str) -> bytes:
        """KeyError where the profile has no such file."""
        return self._store.read(name, file)

    def _ended(self, profile: _Profile, steps: int) -> None:
        profile.steps, profile.state = steps, "writing"
        task = asyncio.create_task(self._finish(profile))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, profile: _Profile) -> None:
        try:
            await self._gather(profile)
        except Exception as error:
            log.warning("profile %s: %s", profile.name, error)
            profile.state, profile.error = "failed", str(error)
        finally:
            profile.finished.set()

    async def _gather(self, profile: _Profile) -> None:
        folder = self._store.folder(profile.name)
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            while missing := self._missing(folder):
                await asyncio.sleep(_POLL_S)
        del missing
        profile.error = _errors(folder)
        if "CUDA_PROFILER" not in profile.options.activities:  # Nsight's report is elsewhere
            await _merge(folder)
        profile.state = "failed" if profile.error else "done"

    def _missing(self, folder: Path) -> list[int]:
        return [r for r in range(self._ranks) if not (folder / f"rank-{r}.done").exists()]


async def _merge(folder: Path) -> None:
    """Raises RuntimeError with what the process said where it failed."""
    home = str(Path(merge.__file__).resolve().parents[2])
    paths = [home, os.environ.get("PYTHONPATH", "")]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        merge.__name__,
        str(folder),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"merging failed: {said.decode(errors='replace').strip()[-500:]}")


def _errors(folder: Path) -> str | None:
    """What ranks could not record."""
    found = []
    for path in sorted(folder.glob("rank-*.done")):
        error = json.loads(path.read_text())["error"]
        if error is not None:
            found.append(f"{path.stem}: {error}")
    return "; ".join(found) or None


def _soon(calls: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    calls.call_soon_threadsafe(call)
