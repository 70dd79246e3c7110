"""Kernels on the CPU: a .cu file of kdray/kernels built by g++ behind simt.h, with simt.cpp beside
it, driven by ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "kdray" / "kernels"
FLAGS = ("-std=c++17", "-fPIC", "-w", "-fno-gnu-unique", "-fno-semantic-interposition")
KERNEL_FLAGS = (*FLAGS, "-O1", "-shared", "-include", str(HERE / "simt.h"))
# It jumps between stacks, which a fortified longjmp takes for a fault.
MACHINE_FLAGS = (*FLAGS, "-O2", "-U_FORTIFY_SOURCE", "-c")
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
    headers = [path.read_text() for path in sorted(KERNELS.glob("*.cuh"))]
    macros = [f"-D{key}={value}" for key, value in sorted(defines.items())]
    flags = (*KERNEL_FLAGS, *macros, f"-I{KERNELS}")
    return _compiled(f"{name}.so", _host_source(name), headers, flags, _machine())


@cache
def _machine() -> Path:
    text = (HERE / "simt.cpp").read_text()
    return _compiled("simt.o", text, [], (*MACHINE_FLAGS, f"-I{HERE}"))


def _compiled(
    name: str, text: str, headers: Sequence[str], flags: Sequence[str], *objects: Path
) -> Path:
    """One compilation serves all processes and runs that ask for the same."""
    known = (text, headers, (HERE / "simt.h").read_text(), flags, objects)
    built = BUILDS / f"{hashlib.sha256(repr(known).encode()).hexdigest()[:20]}-{name}"
    if not built.exists():
        BUILDS.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
            source, result = Path(folder, "source.cpp"), Path(folder, name)
            source.write_text(text)
            command = ["g++", *flags, "-o", result, source, *objects]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            result.replace(built)
    return built


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
