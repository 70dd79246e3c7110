"""skinny_gemm.cu: its own source, run on the CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kdray.kernels import cuda_gemm
from kdray.kernels.cuda import CudaOps
from kdray.kernels.cuda_gemm import CudaGemm
from kdray.kernels.gemm_plan import GemmPlan
from kdray.kernels.ops import load_ops
from kdray.model import weights
from kdray.model.target import TargetModel
from tests.kernels import gemm_cases as cases
from tests.kernels.simt_loader import simt_loader
from tests.model.paged import PagedRunner, Part
from tests.model.tiny import save_plain


@pytest.fixture(scope="module")
def gemm() -> CudaGemm:
    return CudaGemm(simt_loader(seed=3))


# Fields as GemmPlan has them: row tiles, warps over outputs, warps over runs, split, slots.
PLANS = [
    GemmPlan(1, 1, 4, 1, 4),
    GemmPlan(1, 2, 2, 2, 4),
    GemmPlan(2, 2, 1, 4, 4),
]
# For many tokens: 1, 2 and 4 warps share a run; sums from 1, 2 and 4 blocks.
MANY = [
    GemmPlan(1, 1, 4, 1, 4),
    GemmPlan(2, 2, 2, 2, 4),
    GemmPlan(1, 4, 1, 4, 4),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 32, 8), (5, 96, 24), (9, 1056, 40)])
def test_linear(gemm: CudaGemm, tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    cases.check_linear(gemm, tokens, inputs, outputs, dtype=dtype)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_each_way_to_cut_it(plan: GemmPlan) -> None:
    gemm = CudaGemm(simt_loader(seed=4), plan=plan)
    for _ in range(2):  # the workspace is empty again
        cases.check_linear(gemm, 17, 288, 72, dtype=torch.float32, add=True, gap=8)
        cases.check_linear(gemm, 3, 64, 8, add=True)
    if gemm._work is not None:
        assert (gemm._work == -1).all()


def test_the_way_it_is_cut_changes_no_bit() -> None:
    gemms = {plan: CudaGemm(simt_loader(seed=6), plan=plan) for plan in PLANS}
    cases.check_plans(gemms, 9, 352, 40)


@pytest.mark.parametrize("tokens", [12, 17, 45])
def test_many_tokens_are_cut_in_each_way(tokens: int) -> None:
    gemms = {plan: CudaGemm(simt_loader(seed=9), plan=plan) for plan in MANY}
    cases.check_plans(gemms, tokens, 448, 72)
    for gemm in gemms.values():
        cases.check_linear(gemm, tokens, 32 * 9, 40, add=True, gap=8)
        assert gemm._work is None or (gemm._work == -1).all()


@pytest.mark.parametrize("tokens", [3, 20])
def test_rows_that_come_in_many_chunks(tokens: int) -> None:
    """Buffers are used again, by runs that are not equally long."""
    for plan in (GemmPlan(1, 1, 1, 1, 4), GemmPlan(1, 2, 2, 1, 3)):
        gemm = CudaGemm(simt_loader(seed=8), plan=plan)
        cases.check_linear(gemm, tokens, 32 * 63, 8)


def test_more_rows_than_a_block_takes(gemm: CudaGemm) -> None:
    cases.check_linear(gemm, 67, 64, 24)


def test_a_row_does_not_depend_on_its_batch(gemm: CudaGemm) -> None:
    cases.check_alone(gemm, 65, 256, 8)


@pytest.mark.parametrize(("tokens", "inputs", "inner"), [(1, 32, 8), (6, 160, 24)])
def test_gated_linear(gemm: CudaGemm, tokens: int, inputs: int, inner: int) -> None:
    cases.check_gated(gemm, tokens, inputs, inner)


def test_gated_linear_over_blocks() -> None:
    cases.check_gated(CudaGemm(simt_loader(seed=4), plan=PLANS[1]), 11, 256, 40)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("tokens", [3, 11])
def test_a_pair_is_its_two_products(plan: GemmPlan, tokens: int) -> None:
    """Neither matrix is of whole blocks, so the first's last block is not the second's first."""
    gemm = CudaGemm(simt_loader(seed=5), plan=plan)
    cases.check_pair(gemm, tokens, 32 * 9, 40, 24)
    assert gemm._work is None or (gemm._work == -1).all()


def test_a_pair_of_more_rows_than_a_block_takes() -> None:
    cases.check_pair(CudaGemm(simt_loader(seed=5), plan=PLANS[1]), 67, 128, 24, 8)


def test_what_is_no_pair_is_two_products(gemm: CudaGemm) -> None:
    """Matrices of other runs, gates of no whole tiles, and what the library multiplies."""
    few, many = (cases.matrix(2, 1024, outputs, gemm.device) for outputs in (8, 4096))
    assert gemm._pair_plan(cases.drawn(1, 2, 1024), few, many) is None
    x, weight = cases.drawn(1, 2, 64), cases.matrix(3, 64, 24, gemm.device)
    for rows, given in ((x, weight), (x.float(), weight.float())):
        assert gemm._pair_plan(rows, given, given) is None
        found, gates = gemm.linear_and_gated(rows, given, given)
        assert torch.equal(found, gemm.linear(rows, given))
        assert torch.equal(gates, gemm.gated_linear(rows, given))


def test_per_head(gemm: CudaGemm) -> None:
    cases.check_heads(gemm, 5, 3, 64, 24)
    cases.check_heads(gemm, 10, 2, 256, 16)


def test_a_model_multiplies_by_the_kernel_as_by_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices lie as they do on a GPU, the router's in bfloat16."""
    monkeypatch.setattr(weights, "laid_out", lambda weight: weight.contiguous().mT)
    router = weights.WeightReader._router
    monkeypatch.setattr(weights.WeightReader, "_router", lambda *of: router(*of).bfloat16())
    taken: Counter[str] = Counter()

    def counted(self: CudaGemm, name: str, *args: Any, **more: Any) -> None:
        taken[name] += 1
        start(self, name, *args, **more)

    start = cuda_gemm.CudaGemm.start
    monkeypatch.setattr(cuda_gemm.CudaGemm, "start", counted)
    folder, logits = save_plain(tmp_path / "model", "kimi"), []
    for ops in (load_ops("cpu"), CudaOps(torch.device("cpu"), simt_loader(seed=2))):
        runner = PagedRunner(TargetModel.load(folder, ops=ops, dtype=torch.bfloat16))
        runner.caches = [cache.bfloat16() for cache in runner.caches]
        text = runner.text(40)
        runner.run(Part(text, [5, 6, 7]))
        logits.append(runner.logits(Part(text, [8], [9, 10, 11], [0, 0, 1])))
    wanted, found = logits
    # In two steps: of each of 3 layers the first product and an MLP's two, of which the first is
    # one with the router's in 2 layers; and the head's. The others have inputs of no whole steps.
    assert taken == {"skinny_gemm": 2 * 3 * 3 + 1 - 2 * 2, "skinny_gemm_pair": 2 * 2}
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.median() < 0.05  # a row whose expert choice flips is far off; most are not
