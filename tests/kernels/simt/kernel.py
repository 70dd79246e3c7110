"""Kernels on the CPU: a .cu file of kdray/kernels built by g++ behind simt.h, driven by ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "kdray" / "kernels"
FLAGS = ("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-w", "-fno-gnu-unique")
BUILDS = Path(tempfile.gettempdir()) / "kdray-simt"

Argument = NDArray[np.generic] | np.generic | int | None

_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];")


class SimtKernel:
    """Entry points of one kernel file.

    apart: with a machine of its own, which runs beside others on another thread.
    """

    def __init__(
        self, name: str, defines: Mapping[str, str | int] | None = None, *, apart: bool = False
    ) -> None:
        built = _build(name, defines or {})
        self._library = _load_copy(built) if apart else ctypes.CDLL(str(built))

    def launch(
        self,
        entry: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Argument, ...],
        *,
        seed: int = 0,
    ) -> None:
        """Arrays give their address, None a null pointer, an int is an int32; NumPy scalars pass
        as they are. `seed` draws the order in which threads run."""
        held = [_value(argument) for argument in args]
        pointers = (ctypes.c_void_p * len(held))(*(value.ctypes.data for value in held))
        run = getattr(self._library, f"simt_run_{entry}")
        run(pointers, _three(grid), _three(block), ctypes.c_uint(seed))


def _load_copy(built: Path) -> ctypes.CDLL:
    """A file that has been loaded already would be the same library again."""
    with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
        return ctypes.CDLL(shutil.copy(built, folder))


def _value(argument: Argument) -> NDArray[np.generic]:
    """The argument's bytes, in an array that keeps them alive."""
    if argument is None:
        return np.zeros(1, np.uint64)
    if isinstance(argument, np.ndarray):
        assert argument.flags.c_contiguous
        return np.array([argument.ctypes.data], np.uint64)
    if isinstance(argument, np.generic):
        return np.array([argument])
    return np.array([argument], np.int32)


def _three(size: tuple[int, ...]) -> ctypes.Array[ctypes.c_uint]:
    return (ctypes.c_uint * 3)(*size, *(1,) * (3 - len(size)))


def _build(name: str, defines: Mapping[str, str | int]) -> Path:
    text = _host_source(name)
    headers = b"".join(path.read_bytes() for path in sorted(KERNELS.glob("*.cuh")))
    shim = (HERE / "simt.h").read_bytes()
    key = hashlib.sha256(repr((text, headers, shim, FLAGS, sorted(defines.items()))).encode())
    library = BUILDS / f"{name}-{key.hexdigest()[:20]}.so"
    if not library.exists():
        BUILDS.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
            source, built = Path(folder, f"{name}.cpp"), Path(folder, "built.so")
            source.write_text(text)
            macros = [f"-D{key}={value}" for key, value in defines.items()]
            command = ["g++", *FLAGS, *macros, f"-I{KERNELS}", "-include", HERE / "simt.h"]
            done = subprocess.run(
                [*command, "-o", built, source], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            built.replace(library)
    return library


def _host_source(name: str) -> str:
    """The file with dynamic shared memory bound to the shim's, and a runner per entry point."""
    path = KERNELS / f"{name}.cu"
    text = path.read_text()
    entries = _ENTRY.findall(text)
    assert entries, f"{path} has no entry point"
    bound = _DYNAMIC.sub(r"static \1* const \2 = (\1*)simt::dynamic_shared;", text)
    runners = "\n".join(
        f'extern "C" void simt_run_{entry}(void** a, const unsigned* grid, const unsigned* block, '
        f"unsigned seed) {{ simt::launch({entry}, a, grid, block, seed); }}"
        for entry in entries
    )
    return f'#line 1 "{path}"\n{bound}\n{runners}\n'
