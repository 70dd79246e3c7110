"""rms_norm.cu, rope_cache.cu, swiglu.cu, route_experts.cu: their own source, run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdray.kernels.cuda import CudaOps
from kdray.kernels.cuda_fused import CudaFused
from kdray.kernels.ops import load_ops
from kdray.model.target import TargetModel
from tests.kernels import fused_cases as cases
from tests.kernels.simt_loader import simt_loader
from tests.model.paged import PagedRunner, Part
from tests.model.tiny import save_plain


@pytest.fixture(scope="module")
def fused() -> CudaFused:
    return CudaFused(simt_loader(seed=5))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "gap"),
    [(1, 8, 0), (3, 24, 1), (2, 128, 3), (3, 512, 0), (2, 1536, 36), (1, 2056, 0), (2, 7168, 0)],
)
def test_rms_norm(fused: CudaFused, rows: int, width: int, gap: int, dtype: torch.dtype) -> None:
    cases.check_norm(fused, rows, width, dtype, gap)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("joined", [False, True], ids=["own product", "joined product"])
@pytest.mark.parametrize("name", cases.ATTENTIONS)
def test_rope_cache(fused: CudaFused, name: str, joined: bool, dtype: torch.dtype) -> None:
    for rows in (1, 4):
        cases.check_rope(fused, rows, cases.ATTENTIONS[name], dtype, joined)


@pytest.mark.parametrize("name", cases.ATTENTIONS)
def test_rope_cache_in_fp8(fused: CudaFused, name: str) -> None:
    cases.check_rope_fp8(fused, 6, cases.ATTENTIONS[name])


def test_rows_of_padding_leave_the_cache_alone(fused: CudaFused) -> None:
    cases.check_padding(fused)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (2, 3, 256), (1, 2 * 2056)], ids=str)
def test_swiglu(fused: CudaFused, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cases.check_swiglu(fused, shape, dtype)


def test_swiglu_far_out(fused: CudaFused) -> None:
    cases.check_swiglu_far_out(fused)


@pytest.mark.parametrize("kind", cases.ROUTINGS)
@pytest.mark.parametrize("name", cases.RULES)
def test_route_experts(fused: CudaFused, name: str, kind: str) -> None:
    for rows in (1, 6):
        cases.check_routing(fused, rows, name, kind)


@pytest.mark.parametrize("name", cases.RULES)
def test_padding_goes_to_no_expert(fused: CudaFused, name: str) -> None:
    cases.check_routing_of_padding(fused, name)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_per_head(fused: CudaFused, dtype: torch.dtype) -> None:
    cases.check_per_head(fused, 5, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["kimi", "deepseek", "plain_query"])
def test_a_model_runs_by_the_kernels_as_by_the_reference(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    folder = save_plain(tmp_path / kind, kind)
    logits = []
    for ops in (load_ops("cpu"), CudaOps(torch.device("cpu"), simt_loader(seed=2))):
        runner = PagedRunner(TargetModel.load(folder, ops=ops, dtype=dtype))
        runner.caches = [cache.to(dtype) for cache in runner.caches]
        text = runner.text(40)
        runner.run(Part(text, [5, 6, 7]))
        logits.append(runner.logits(Part(text, [8], [9, 10, 11], [0, 0, 1])))
    wanted, found = logits
    if dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    else:  # a row whose expert choice flips is far off; most are not
        error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert error.median() < 0.05


def test_a_model_runs_over_rows_in_fp8_by_the_kernels_as_by_the_reference(tmp_path: Path) -> None:
    """Both kernels take these sizes: one writes the rows, the other reads them."""
    folder = save_plain(tmp_path / "model", "wide_latent")
    logits, caches = [], []
    for ops in (load_ops("cpu"), CudaOps(torch.device("cpu"), simt_loader(seed=2))):
        runner = PagedRunner(TargetModel.load(folder, ops=ops, dtype=torch.bfloat16))
        runner.keep_in_fp8()
        text = runner.text(40)
        runner.run(Part(text, [5, 6, 7]))
        logits.append(runner.logits(Part(text, [8], [9, 10, 11], [0, 0, 1])))
        caches.append(runner.caches[0])
    wanted, found = logits
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.median() < 0.1  # of a number near a half of e4m3's place both neighbours are right
    assert (caches[0] != caches[1]).any(1).sum() <= 7 and (caches[0] != 0xFF).any(1).sum() == 7
    assert (caches[0] != caches[1]).double().mean() < 0.01
