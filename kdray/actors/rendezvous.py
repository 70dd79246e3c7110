"""Where the ranks of one gang meet."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Made by rank 0, given to every rank.

    host, port   the TCPStore that rank 0 keeps open
    folder       a folder only this user can enter, with one ipc socket a rank
    """

    host: str
    port: int
    folder: str

    def endpoint(self, rank: int) -> str:
        return f"ipc://{self.folder}/rank-{rank}"

    def heartbeat(self, rank: int) -> str:
        """The file in which a rank leaves signs of life."""
        return f"{self.folder}/beat-{rank}"


def make_folder() -> str:
    """A 0700 folder with a short name (an ipc path may hold about 100 characters)."""
    folder = tempfile.mkdtemp(prefix="kdray-", dir=_short_tmp())
    os.chmod(folder, 0o700)
    return folder


def remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _short_tmp() -> str | None:
    return "/tmp" if os.path.isdir("/tmp") and os.access("/tmp", os.W_OK) else None
