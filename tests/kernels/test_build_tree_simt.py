"""build_tree.cu's own source on the CPU shim, against core.tree: every design, every kind of row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tests.kernels.simt.kernel import SimtKernel
from tests.kernels.tree_cases import KINDS, Arrays, Case, case_of, expected

LIMITS = {
    "build_tree_pop_32": 32,
    "build_tree_pop_64": 64,
    "build_tree_pop_128": 128,
    "build_tree_threshold_256": 256,
    "build_tree_threshold_1024": 1024,
}
THREADS = {"build_tree_threshold_256": 512, "build_tree_threshold_1024": 512}
POPS = [entry for entry in LIMITS if "pop" in entry]


@pytest.fixture(scope="module")
def kernel() -> SimtKernel:
    return SimtKernel("build_tree")


def built(
    kernel: SimtKernel,
    entry: str,
    case: Case,
    num_nodes: int,
    *,
    seed: int = 0,
    leave_out: tuple[str, ...] = (),
) -> Arrays:
    requests, depth, width = case.token.shape
    out = Arrays.empty(requests, num_nodes, -77)
    columns: Mapping[str, np.ndarray] = out.columns()
    outputs = tuple(None if name in leave_out else array for name, array in columns.items())
    inputs = (case.token, case.score, case.roots, case.base, case.budgets)
    kernel.launch(
        entry,
        (requests,),
        (THREADS.get(entry, 32),),
        (*outputs, *inputs, depth, width, num_nodes),
        seed=seed,
    )
    return out


def assert_equal(found: Arrays, wanted: Arrays, case: Case) -> None:
    for name, array in wanted.columns().items():
        wrong = (getattr(found, name) != array).reshape(len(array), -1).any(axis=1)
        assert not wrong.any(), f"{name} of requests {np.flatnonzero(wrong)[:5]}"


@pytest.mark.parametrize("entry", POPS)
@pytest.mark.parametrize(("depth", "width"), [(7, 16), (15, 32), (4, 5), (1, 64), (15, 1)])
def test_pops(kernel: SimtKernel, entry: str, depth: int, width: int) -> None:
    limit = LIMITS[entry]
    rng = np.random.default_rng(depth * 100 + width)
    budgets = [limit, limit, limit - 1, limit, limit // 2, limit, limit, 1, limit][: len(KINDS)]
    case = case_of(rng, depth=depth, width=width, budgets=budgets * 2)
    found = built(kernel, entry, case, limit + 1, seed=width)
    assert_equal(found, expected(case, limit + 1), case)


@pytest.mark.parametrize(
    ("entry", "budgets", "depth", "width"),
    [
        ("build_tree_threshold_256", [256, 255, 129, 256, 200, 3, 256, 256, 256], 7, 32),
        ("build_tree_threshold_256", [256, 256, 256, 256], 15, 13),
        ("build_tree_threshold_1024", [1024, 1023, 1024], 7, 32),
    ],
)
def test_threshold(
    kernel: SimtKernel, entry: str, budgets: list[int], depth: int, width: int
) -> None:
    case = case_of(np.random.default_rng(width), depth=depth, width=width, budgets=budgets)
    num_nodes = LIMITS[entry] + 1
    found = built(kernel, entry, case, num_nodes, seed=depth)
    assert_equal(found, expected(case, num_nodes), case)
