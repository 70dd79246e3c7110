"""Where the files of profiles lie. Names come from here alone, and nothing else is ever read."""

from __future__ import annotations

import os
import stat
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from kdray.errors import ConfigError


class ProfileStore:
    """A folder of profiles, a folder each; only this user can enter it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def at(cls, folder: str | None) -> ProfileStore:
        """None: a folder of this user's own under the system's temporary one."""
        own = Path(tempfile.gettempdir()) / f"kdray-profiles-{os.getuid()}"
        return cls(Path(folder).expanduser().absolute() if folder else own)

    def create(self) -> str:
        """A new profile's name; its folder is there and empty. ConfigError: nowhere to put it."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ConfigError(f"{self.root} belongs to somebody else: give --profile-folder")
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        for number in range(1000):
            name = f"{stamp}-{number:03d}"
            try:
                (self.root / name).mkdir(mode=0o700)
            except FileExistsError:
                continue
            return name
        raise OSError(f"{self.root} holds a thousand profiles of this second")

    def names(self) -> list[str]:
        """All profiles, oldest first."""
        if not self.root.is_dir():
            return []
        return sorted(e.name for e in os.scandir(self.root) if e.is_dir(follow_symlinks=False))

    def files(self, name: str) -> dict[str, int]:
        """A profile's files and their sizes in bytes; KeyError where there is no such profile."""
        folder = self.folder(name)
        entries = [entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
        return {e.name: e.stat().st_size for e in sorted(entries, key=lambda e: e.name)}

    def folder(self, name: str) -> Path:
        """KeyError unless `name` is one of names(): no path that somebody wrote is followed."""
        if name not in self.names():
            raise KeyError(name)
        return self.root / name

    def read(self, name: str, file: str) -> bytes:
        """KeyError unless `file` is one of files(name)."""
        if file not in self.files(name):
            raise KeyError(file)
        return (self.root / name / file).read_bytes()
