"""CudaOps on the CPU: its choices, its launchers and the kernels' own source, emulated."""

from __future__ import annotations

import pytest
import torch

from kdray.errors import KernelError
from kdray.kernels.cuda import CudaOps
from tests.kernels import ops_against_reference as against
from tests.kernels.simt_loader import simt_loader


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    return CudaOps(torch.device("cpu"), simt_loader(seed=3))


@pytest.mark.parametrize("kind", against.KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "k"), [((1, 1), 1), ((2, 2, 1000), 16), ((1, 33), 64), ((2, 500), 70)], ids=str
)
def test_topk_logprob(
    ops: CudaOps, shape: tuple[int, ...], k: int, dtype: torch.dtype, kind: str
) -> None:
    against.check_topk(ops, shape, k, dtype, kind)


@pytest.mark.parametrize("grid", [0.5, 1e-6], ids=["ties", "no ties"])
@pytest.mark.parametrize("depth", [0, 7, 15, 17])
@pytest.mark.parametrize(
    ("width", "budgets"),
    [(1, [0]), (16, [7, 8, 1, 0, 3]), (17, [63, 65, 2]), (70, [20, 3]), (70, [90, 1])],
    ids=str,
)
def test_build_trees(ops: CudaOps, width: int, budgets: list[int], depth: int, grid: float) -> None:
    against.check_trees(ops, depth, width, budgets, grid)


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_sample_tokens(ops: CudaOps, kind: str) -> None:
    against.check_sampling(ops, list(against.WISHES), 2 * len(against.WISHES), 700, kind)


def test_rows_without_a_finite_logit_are_named(ops: CudaOps) -> None:
    against.check_dead_rows(ops)


@pytest.mark.parametrize("nodes", [1, 9, 40, 1030])
def test_accept_paths(ops: CudaOps, nodes: int) -> None:
    against.check_paths(ops, 6, nodes)


@pytest.mark.parametrize("moves", [0, 1, 12, 5000])
def test_commit_kv(ops: CudaOps, moves: int) -> None:
    against.check_commit(ops, moves)


def test_verify_attention(ops: CudaOps) -> None:
    against.check_attention(ops)


def test_without_a_cuda_device_there_are_no_kernels() -> None:
    with pytest.raises(KernelError, match="not on cpu"):
        CudaOps(torch.device("cpu"))


def test_rows_of_new_caches_move_where_old_ones_lay(ops: CudaOps) -> None:
    """Memory and object ids come back; what was known of the caches before must not."""
    source, target = torch.tensor([1]), torch.tensor([0])
    for width in (8, 3, 24, 8, 5):
        caches = [torch.arange(2.0 * width).view(2, width) for _ in range(3)]
        ops.commit_kv(caches, source, target)
        assert all(torch.equal(cache[0], cache[1]) for cache in caches)
        assert caches[0][0, 0] == width
        del caches
