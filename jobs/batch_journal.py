"""What is done of a batch, kept so that a run which ends at any moment can be gone on with.

Results are appended to OUTPUT.partial as they come, one write a line. A line that was cut in the
middle is dropped at the next start, and its request runs again. When all are there they are put
into OUTPUT in the input's order, at once, and OUTPUT.partial goes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kdray.errors import KdrayError

Json = dict[str, Any]


def fingerprint(lines: Sequence[Json], settings: Mapping[str, Any]) -> str:
    """Of everything that decides what a batch's results are."""
    text = json.dumps([list(lines), dict(settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Journal:
    """Entered, it holds OUTPUT.partial for this process alone.

    done   number of a line -> where its result stands in the file, as (start, length) in bytes
    """

    def __init__(self, output: Path, batch: str, *, overwrite: bool = False) -> None:
        self.done: dict[int, tuple[int, int]] = {}
        self._output = output
        self._path = output.with_name(output.name + ".partial")
        self._batch = batch
        self._overwrite = overwrite
        self._file = -1
        self._end = 0

    def __enter__(self) -> Self:
        if not self._output.resolve().parent.is_dir():
            raise KdrayError(f"--output {self._output}: there is no such folder")
        if self._output.exists() and not self._path.exists() and not self._overwrite:
            raise KdrayError(f"--output {self._output} is there already; --overwrite replaces it")
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock()
            self._read()
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        os.close(self._file)

    def add(self, number: int, record: Json) -> None:
        """One line's result; it is on its way to the disk when this returns."""
        self.done[number] = self._append({"line": number, "record": record})

    def record(self, number: int) -> Json:
        start, length = self.done[number]
        record: Json = json.loads(os.pread(self._file, length, start))["record"]
        return record

    def finish(self, numbers: Sequence[int]) -> None:
        """Write OUTPUT in this order, whole or not at all, and drop the journal."""
        whole = self._output.with_name(self._output.name + ".whole")
        with whole.open("w", encoding="utf-8") as file:
            for number in numbers:
                file.write(json.dumps(self.record(number), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(whole, self._output)
        self._path.unlink()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KdrayError(f"another process is writing {self._path}") from None

    def _read(self) -> None:
        """Learn what is done; begin anew where that was asked for or nothing whole is there."""
        if self._overwrite:
            os.ftruncate(self._file, 0)
        with open(self._path, "rb") as file:
            for written in file:
                if not written.endswith(b"\n"):
                    break  # cut in the middle
                self._learn(json.loads(written), len(written))
                self._end += len(written)
        os.ftruncate(self._file, self._end)
        if self._end == 0:
            self._append({"batch": self._batch})

    def _learn(self, value: Json, length: int) -> None:
        if self._end > 0:
            self.done[value["line"]] = (self._end, length)
        elif value.get("batch") != self._batch:
            raise KdrayError(
                f"{self._path} was begun with another input or other options; "
                "--overwrite begins anew"
            )

    def _append(self, value: Json) -> tuple[int, int]:
        written = (json.dumps(value, ensure_ascii=False) + "\n").encode()
        place = (self._end, len(written))
        view = memoryview(written)
        while view:
            count = os.pwrite(self._file, view, self._end)
            self._end += count
            view = view[count:]
        return place
