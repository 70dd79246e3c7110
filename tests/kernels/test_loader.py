"""Kernels are compiled without a GPU, kept on disk, and refused with a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kdray.errors import KernelError
from kdray.kernels import nvrtc
from kdray.kernels.cubin_cache import CubinCache, default_folder
from kdray.kernels.loader import KernelLoader, _cell, compile_cubin
from kdray.kernels.nvrtc import Cubin, KernelSource, compile_source, read_source

ARCH = "sm_90"
SCALE = """#include "factor.cuh"
extern "C" __global__ void scale(float* out, const float* in, int n) {
    __shared__ float staged[64];
    staged[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = FACTOR * OFFSET * staged[63 - threadIdx.x];
}
extern "C" __global__ void clear(float* out) { out[threadIdx.x] = 0.0f; }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scale.cu").write_text(SCALE)
    (tmp_path / "factor.cuh").write_text("#define FACTOR 3\n")
    return tmp_path


def source(folder: Path, arch: str = ARCH, offset: int = 2) -> KernelSource:
    return read_source("scale", arch, {"OFFSET": offset}, folder)


def test_a_cubin_says_what_its_entry_points_use(folder: Path) -> None:
    cubin = compile_source(source(folder))
    assert cubin.image.startswith(b"\x7fELF")
    assert set(cubin.entries) == {"scale", "clear"}
    assert cubin.entries["scale"].shared_bytes == 64 * 4
    assert cubin.entries["clear"].shared_bytes == 0
    assert all(0 < usage.registers < 64 for usage in cubin.entries.values())
    assert all(usage.spill_bytes == 0 for usage in cubin.entries.values())


def test_an_empty_log_leaves_other_bytes_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of one byte would be written into Python's only object for that byte."""
    monkeypatch.setattr(nvrtc, "OPTIONS", ("--std=c++17",))
    cubin = compile_source(source(folder))
    assert cubin.log == "" and cubin.image.startswith(b"\x7fELF")
    assert bytes([32]) == bytearray(b"\x20")


def test_spills_are_seen(folder: Path) -> None:
    (folder / "spill.cu").write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) spill(double* x, int n) {\n'
        "  double v[48];\n"
        "  for (int i = 0; i < 48; ++i) v[i] = x[i * n];\n"
        "  for (int r = 0; r < n; ++r)\n"
        "    for (int i = 0; i < 48; ++i) v[i] = v[i] * v[(i * 7 + 1) % 48] + x[r];\n"
        "  for (int i = 0; i < 48; ++i) x[i * n] = v[i];\n"
        "}\n"
    )
    usage = compile_source(read_source("spill", ARCH, {}, folder)).entries["spill"]
    assert usage.registers == 32
    assert usage.spill_bytes > 0


def test_a_compile_error_carries_the_compilers_text(folder: Path) -> None:
    (folder / "factor.cuh").write_text("#define FACTOR nowhere\n")
    with pytest.raises(KernelError, match=r'(?s)scale\.cu does not compile.*"nowhere"'):
        compile_source(source(folder))


def test_missing_sources_are_named(folder: Path) -> None:
    with pytest.raises(KernelError, match="no kernel 'nowhere'"):
        compile_cubin("nowhere", ARCH)
    (folder / "factor.cuh").unlink()
    with pytest.raises(KernelError, match=r"factor\.cuh does not exist"):
        source(folder)


def test_the_digest_knows_everything_that_decides_the_code(folder: Path) -> None:
    digests = [source(folder).digest(), source(folder, "sm_120").digest()]
    digests.append(source(folder, offset=3).digest())
    (folder / "factor.cuh").write_text("#define FACTOR 5\n")
    digests.append(source(folder).digest())
    (folder / "scale.cu").write_text(SCALE + "\n")
    digests.append(source(folder).digest())
    assert len(set(digests)) == len(digests)
    assert source(folder).digest() == source(folder).digest()


class Counting:
    """A compiler that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, source: KernelSource) -> Cubin:
        self.calls += 1
        return Cubin(image=b"\x7fELF" + source.text.encode(), log="", entries={})


def test_a_cubin_is_compiled_once(folder: Path, tmp_path: Path) -> None:
    compiler = Counting()
    first = CubinCache(tmp_path / "cache", compiler).path(source(folder))
    second = CubinCache(tmp_path / "cache", compiler).path(source(folder))
    assert first == second
    assert first.read_bytes().startswith(b"\x7fELF")
    assert compiler.calls == 1
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert sorted(path.suffix for path in first.parent.iterdir()) == [".cubin", ".sha256"]


@pytest.mark.parametrize("damage", ["torn", "note torn", "note gone"])
def test_a_damaged_cubin_is_compiled_again(folder: Path, tmp_path: Path, damage: str) -> None:
    compiler = Counting()
    cache = CubinCache(tmp_path / "cache", compiler)
    path = cache.path(source(folder))
    whole = path.read_bytes()
    note = path.with_suffix(".sha256")
    if damage == "torn":
        path.write_bytes(whole[:-1])
    elif damage == "note torn":
        note.write_bytes(b"\xff")
    else:
        note.unlink()
    assert cache.path(source(folder)).read_bytes() == whole
    assert compiler.calls == 2
    cache.path(source(folder))
    assert compiler.calls == 2


def test_a_folder_others_may_write_is_refused(folder: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(KernelError, match="chmod 700"):
        CubinCache(shared, Counting()).path(source(folder))


def test_the_cache_folder_is_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDRAY_CACHE_DIR", "/somewhere")
    assert default_folder() == Path("/somewhere")
    monkeypatch.delenv("KDRAY_CACHE_DIR")
    assert default_folder() == Path.home() / ".cache" / "kdray"


def test_only_cuda_devices_have_kernels() -> None:
    with pytest.raises(KernelError, match="not on cpu"):
        KernelLoader(torch.device("cpu"))


def test_importing_the_loader_touches_no_gpu_library() -> None:
    code = (
        "import sys, kdray.kernels.loader as loader\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not {'cupy', 'cuda.bindings.nvrtc'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arguments_become_the_bytes_that_cuda_reads() -> None:
    tensor = torch.zeros(3)
    assert _cell(tensor) == tensor.data_ptr()
    assert _cell(None) == 0
    assert _cell(-5) == 2**32 - 5 and _cell(np.int64(-5)) == 2**64 - 5
    assert _cell(np.float32(0.5)) == 0x3F000000 and _cell(np.uint64(2**63)) == 2**63
    with pytest.raises(OverflowError, match="int32"):
        _cell(2**31)
    for unclear in (0.5, True, "x"):
        with pytest.raises(TypeError, match="NumPy scalar"):
            _cell(unclear)  # type: ignore[arg-type]
