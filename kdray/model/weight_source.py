"""Where weights come from, chosen once: a folder's files, or numbers drawn by their names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from kdray.config import LoadFormat
from kdray.model.checkpoint import Checkpoint
from kdray.model.dummy_weights import Described, DrawnCheckpoint, described
from kdray.model.placed import OnRead, PlacedCheckpoint


class WeightSource(Protocol):
    """Opened by headers, which are checked; placed for the tensors themselves.

    what              names them in progress lines
    has_whole_rows    a part of some columns costs whole rows, as in a file
    """

    what: str
    has_whole_rows: bool

    def open(self, folder: str | Path, tensors: Iterable[Described]) -> Checkpoint:
        """What the folder holds; `tensors` are those that its config.json asks for."""
        ...

    def place(
        self,
        opened: Checkpoint,
        device: torch.device,
        on_read: OnRead = lambda _: None,
        threads: int = 1,
    ) -> PlacedCheckpoint | DrawnCheckpoint:
        """Its tensors on a device; to be closed. on_read is told the bytes of every part."""
        ...


class Files:
    """What was downloaded or trained."""

    what = "weights"
    has_whole_rows = True

    def open(self, folder: str | Path, tensors: Iterable[Described]) -> Checkpoint:
        return Checkpoint.open(folder)

    def place(
        self,
        opened: Checkpoint,
        device: torch.device,
        on_read: OnRead = lambda _: None,
        threads: int = 1,
    ) -> PlacedCheckpoint:
        return PlacedCheckpoint(opened, device, on_read, threads)


class Dummies:
    """What config.json describes, without any other file: its text means nothing."""

    what = "dummy weights"
    has_whole_rows = False

    def open(self, folder: str | Path, tensors: Iterable[Described]) -> Checkpoint:
        return described(Path(folder), tensors)

    def place(
        self,
        opened: Checkpoint,
        device: torch.device,
        on_read: OnRead = lambda _: None,
        threads: int = 1,
    ) -> DrawnCheckpoint:
        return DrawnCheckpoint(opened, device, on_read)


def weight_source(load_format: LoadFormat) -> WeightSource:
    """load_format: as EngineConfig.load_format."""
    return Dummies() if load_format == "dummy" else Files()
