"""CudaOps equals ReferenceOps op by op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdray.integrations.sglang import build_ddtree_trees_from_topk
from kdray.kernels.cuda import CudaOps
from kdray.kernels.ops import SamplingRows
from tests.kernels import ops_against_reference as against

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def ops(device: torch.device) -> CudaOps:
    return CudaOps(device)


@pytest.mark.parametrize("kind", against.KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "k"),
    [((1, 1), 1), ((3, 7, 1000), 16), ((2, 5, 33), 64), ((9, 20_011), 8), ((2, 500), 70)],
    ids=str,
)
def test_topk_logprob(
    ops: CudaOps, shape: tuple[int, ...], k: int, dtype: torch.dtype, kind: str
) -> None:
    against.check_topk(ops, shape, k, dtype, kind)


@pytest.mark.parametrize("grid", [0.5, 1e-6], ids=["ties", "no ties"])
@pytest.mark.parametrize("depth", [0, 1, 7, 15, 17])
@pytest.mark.parametrize(
    ("width", "budgets"),
    [
        (1, [0]),
        (16, [0, 0]),
        (16, [7, 8, 1, 0, 3]),
        (64, [31, 32, 33, 16]),
        (17, [63, 64, 65, 2]),
        (32, [128, 100, 5]),
        (64, [256, 300, 0]),
        (64, [1024, 31]),
        (70, [20, 3]),
        (70, [90, 1]),
    ],
    ids=str,
)
def test_build_trees(ops: CudaOps, width: int, budgets: list[int], depth: int, grid: float) -> None:
    against.check_trees(ops, depth, width, budgets, grid)


@pytest.mark.parametrize("name", [*against.WISHES, "mixed"])
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_sample_tokens(ops: CudaOps, name: str, kind: str) -> None:
    names = list(against.WISHES) if name == "mixed" else [name]
    against.check_sampling(ops, names, 40, 3001, kind)


def test_no_rows_draw_no_tokens(ops: CudaOps) -> None:
    nothing = SamplingRows(params=[], seed=[], position=[], history=[], end_token_ids=[])
    assert ops.sample_tokens(torch.zeros(0, 50, device=ops.device), nothing).shape == (0,)


def test_rows_without_a_finite_logit_are_named(ops: CudaOps) -> None:
    against.check_dead_rows(ops)


@pytest.mark.parametrize("nodes", [1, 9, 33, 257, 1030])
def test_accept_paths(ops: CudaOps, nodes: int) -> None:
    against.check_paths(ops, 30, nodes)


@pytest.mark.parametrize("moves", [0, 1, 40, 5000])
def test_commit_kv(ops: CudaOps, moves: int) -> None:
    against.check_commit(ops, moves)


def test_verify_attention(ops: CudaOps) -> None:
    against.check_attention(ops)


def test_sglang_trees_from_cuda_tensors_equal_those_from_cpu_tensors(ops: CudaOps) -> None:
    generator = torch.Generator().manual_seed(5)
    best = torch.randn(9, 7, 500, generator=generator).mul(3).log_softmax(-1).topk(16, dim=-1)
    budgets = [16, 1, 0, 33, 64, 8, 8, 200, 5]
    expected = build_ddtree_trees_from_topk(best.values, best.indices, budgets)
    got = build_ddtree_trees_from_topk(
        best.values.to(ops.device), best.indices.to(ops.device), budgets
    )
    for tree, wanted in zip(got, expected, strict=True):
        for value, other in zip(tree, wanted, strict=True):
            same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
            assert same
