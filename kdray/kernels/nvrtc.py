"""CUDA sources to cubins with NVRTC: needs the compiler's wheel, neither a GPU nor a CUDA toolkit.

A source is a .cu file of this folder; the .cuh files it includes by name are handed to the compiler
from memory, so that the text that was hashed is the text that was compiled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kdray.errors import KernelError

FOLDER = Path(__file__).resolve().parent
OPTIONS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v")
SOME_HEADER = "cuda_bf16.h"  # stands for the toolkit's device headers
INSTALL = "pip install 'kdray[cuda]', or nvidia-cuda-nvrtc, nvidia-cuda-runtime and cuda-bindings"

Defines = Mapping[str, str | int]

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STACK = re.compile(r"(\d+) bytes stack frame")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryUsage:
    """What one entry point takes of a multiprocessor.

    registers      a thread
    shared_bytes   a block, static; what a launch adds is not in it
    stack_bytes    a thread, local memory
    spill_bytes    a thread, stored and loaded
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cubin:
    """Machine code for one architecture, the compiler's log, and what each entry point uses."""

    image: bytes
    log: str
    entries: Mapping[str, EntryUsage]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """A .cu file with all that decides its machine code.

    headers   (name, text) of every .cuh it includes, directly or not
    arch      such as "sm_90"
    defines   (name, value) pairs, sorted
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]
    arch: str
    defines: tuple[tuple[str, str], ...]

    def digest(self) -> str:
        """The same for the same machine code: text, headers, options, compiler, architecture."""
        parts = repr((self, OPTIONS, compiler_version(), toolkit_version()))
        return hashlib.sha256(parts.encode()).hexdigest()


def compile_cubin(name: str, arch: str, defines: Defines | None = None) -> Cubin:
    """kdray/kernels/NAME.cu for `arch` ("sm_90"); raises KernelError with the compiler's text."""
    return compile_source(read_source(name, arch, defines or {}))


def read_source(name: str, arch: str, defines: Defines, folder: Path = FOLDER) -> KernelSource:
    path = folder / f"{name}.cu"
    if not path.is_file():
        raise KernelError(f"there is no kernel {name!r}: {path} does not exist")
    text = path.read_text()
    return KernelSource(
        name=name,
        text=text,
        headers=tuple(sorted(_headers(text, folder, {}).items())),
        arch=arch,
        defines=tuple(sorted((key, str(value)) for key, value in defines.items())),
    )


def _headers(text: str, folder: Path, found: dict[str, str]) -> dict[str, str]:
    for name in _INCLUDE.findall(text):
        if name not in found:
            path = folder / name
            if not path.is_file():
                raise KernelError(f'#include "{name}": {path} does not exist')
            found[name] = path.read_text()
            _headers(found[name], folder, found)
    return found


def compile_source(source: KernelSource) -> Cubin:
    nvrtc = _nvrtc()
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = _check(
        nvrtc.nvrtcCreateProgram(
            source.text.encode(), f"{source.name}.cu".encode(), len(names), texts, names
        )
    )
    try:
        options = [option.encode() for option in _options(source)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _log(nvrtc, program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(f"{source.name}.cu does not compile for {source.arch}:\n{log}")
        image = _room(_check(nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc.nvrtcGetCUBIN(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(image=image, log=log, entries=dict(_usages(log)))


def _options(source: KernelSource) -> Iterator[str]:
    yield f"--gpu-architecture={source.arch}"
    yield from OPTIONS
    yield f"--include-path={_toolkit_headers()}"
    for key, value in source.defines:
        yield f"--define-macro={key}={value}"


def _log(nvrtc: ModuleType, program: Any) -> str:
    log = _room(_check(nvrtc.nvrtcGetProgramLogSize(program)))
    _check(nvrtc.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0 ").decode(errors="replace")


def _room(size: int) -> bytes:
    """Bytes for the compiler to write into. An empty log is one byte, and Python has but one object
    for every single byte: written to, it would be another byte to the whole process.
    """
    return b" " * max(size, 2)


def _usages(log: str) -> Iterator[tuple[str, EntryUsage]]:
    """(entry point, usage) from ptxas' verbose report, which names the entry, then counts."""
    for section in log.split("ptxas info")[1:]:
        if entry := _ENTRY.search(section):
            name, stack, spill = entry[1], 0, 0
        elif "Function properties" in section:
            stack = sum(map(int, _STACK.findall(section)))
            spill = sum(int(n) for pair in _SPILLS.findall(section) for n in pair)
        elif used := _REGISTERS.search(section):
            yield (
                name,
                EntryUsage(
                    registers=int(used[1]),
                    shared_bytes=sum(map(int, _SHARED.findall(section))),
                    stack_bytes=stack,
                    spill_bytes=spill,
                ),
            )


@cache
def compiler_version() -> str:
    return "{}.{}".format(*_results(_nvrtc().nvrtcVersion()))


@cache
def toolkit_version() -> str:
    """Of the headers: their own CUDA_VERSION, an integer such as 13000."""
    text = (_toolkit_headers() / "cuda.h").read_text(errors="replace")
    found = re.search(r"^#define CUDA_VERSION (\d+)", text, re.MULTILINE)
    return found[1] if found else "unknown"


@cache
def _toolkit_headers() -> Path:
    """The include folder of the nvidia-cuda-runtime wheel, or else of an installed toolkit."""
    for folder in _header_folders():
        if (folder / SOME_HEADER).is_file():
            return folder
    raise KernelError(f"CUDA's headers ({SOME_HEADER}) are not installed: {INSTALL}")


def _header_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from (Path(root) / part / "include" for part in ("cu13", "cuda_runtime"))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home) / "include"
    yield Path("/usr/local/cuda/include")


@cache
def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the library itself is opened by the first call
    except (ImportError, RuntimeError) as error:
        raise KernelError(f"the CUDA compiler is not installed: {INSTALL} ({error})") from error
    module: ModuleType = nvrtc
    return module


def _check(reply: tuple[Any, ...]) -> Any:
    """The one result of a binding's call (status, result)."""
    results = _results(reply)
    return results[0] if results else None


def _results(reply: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *results = reply
    if status != type(status).NVRTC_SUCCESS:
        raise KernelError(f"NVRTC: {status.name}")
    return tuple(results)
