"""Compiled kernels on disk, found again by a digest of all that decides their machine code.

A cubin lies beside a note of its own digest; one that does not fit its note is compiled again. The
folder is private: what lies in it is run.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from kdray.errors import KernelError
from kdray.kernels.nvrtc import Cubin, KernelSource, compile_source

FOLDER_VARIABLE = "KDRAY_CACHE_DIR"


def default_folder() -> Path:
    """$KDRAY_CACHE_DIR, or else ~/.cache/kdray."""
    wished = os.environ.get(FOLDER_VARIABLE)
    return Path(wished) if wished else Path.home() / ".cache" / "kdray"


class CubinCache:
    """One folder of cubins, shared by all processes of one user."""

    def __init__(
        self,
        folder: Path | None = None,
        compiler: Callable[[KernelSource], Cubin] = compile_source,
    ) -> None:
        self._folder = folder or default_folder()
        self._compiler = compiler

    def path(self, source: KernelSource) -> Path:
        """The file that holds the source's cubin, compiled now if it was not before."""
        image = self._folder / f"{source.name}-{source.arch}-{source.digest()[:32]}.cubin"
        self._make_private()
        if not _is_sound(image):
            cubin = self._compiler(source)
            _replace(image, cubin.image)
            # The note comes last: a cubin without its note is not trusted.
            _replace(_note(image), hashlib.sha256(cubin.image).hexdigest().encode())
        return image

    def _make_private(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self._folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KernelError(
                f"{self._folder} holds code that will run, and others may write there: "
                f"chmod 700 it, or set {FOLDER_VARIABLE} to a folder of your own"
            )


def _note(image: Path) -> Path:
    return image.with_suffix(".sha256")


def _is_sound(image: Path) -> bool:
    try:
        digest = hashlib.sha256(image.read_bytes()).hexdigest()
        return _note(image).read_text() == digest
    except (OSError, UnicodeDecodeError):
        return False


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all, whoever reads or writes it at the same time."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
