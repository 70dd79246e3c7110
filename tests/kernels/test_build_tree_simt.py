"""build_tree.cu itself on the CPU shim, against core.tree: every design, every kind of row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from kdray.core.plan import Candidates
from kdray.core.tree import ABSENT
from kdray.kernels.cuda_trees import (
    DESIGNS,
    POP_32,
    POP_64,
    POP_128,
    THRESHOLD_256,
    THRESHOLD_1024,
    BuiltTrees,
    TreeDesign,
    build_trees,
    build_trees_into,
    choose_design,
    empty_trees,
)
from tests.kernels.simt_loader import simt_loader
from tests.kernels.tree_cases import KINDS, Case, case_of, expected

POPS = (POP_32, POP_64, POP_128)
UNWRITTEN = -77


def build(
    case: Case,
    num_nodes: int,
    design: TreeDesign,
    *,
    seed: int = 0,
    position: bool = True,
    links: bool = True,
) -> BuiltTrees:
    out = empty_trees(
        len(case.roots), num_nodes, torch.device("cpu"), position=position, links=links
    )
    for column in columns(out).values():
        column.fill_(UNWRITTEN)
    token, score, roots, base, budgets = (
        torch.from_numpy(array)
        for array in (case.token, case.score, case.roots, case.base, case.budgets)
    )
    given = Candidates(token=token, score=score)
    build_trees_into(simt_loader(seed), out, given, roots, budgets, base=base, design=design)
    return out


def columns(built: BuiltTrees) -> dict[str, torch.Tensor]:
    trees = ("token", "parent", "depth", "score", "mask", "num_nodes")
    extra = ("position", "first_child", "next_sibling")
    found = {name: getattr(built.trees, name) for name in trees}
    found |= {name: getattr(built, name) for name in extra}
    return {name: column for name, column in found.items() if column is not None}


def assert_equals_core(built: BuiltTrees, case: Case) -> None:
    num_nodes = built.trees.token.shape[1]
    wanted = expected(case, num_nodes)
    for name, column in columns(built).items():
        wrong = (column.numpy() != getattr(wanted, name)).reshape(len(case.roots), -1).any(axis=1)
        assert not wrong.any(), f"{name} of requests {np.flatnonzero(wrong)[:5].tolist()}"


def name_of(value: object) -> str | None:
    return value.entry.removeprefix("build_tree_") if isinstance(value, TreeDesign) else None


@pytest.mark.parametrize("design", POPS, ids=name_of)
@pytest.mark.parametrize(("depth", "width"), [(7, 16), (15, 32), (4, 5), (1, 64), (15, 1), (3, 2)])
def test_popping(design: TreeDesign, depth: int, width: int) -> None:
    limit = design.max_budget
    budgets = [limit, limit, limit - 1, limit, limit // 2, limit, limit, 1, limit] * 2
    rng = np.random.default_rng(depth * 100 + width)
    case = case_of(rng, depth=depth, width=width, budgets=budgets)
    assert_equals_core(build(case, limit + 1, design, seed=width), case)


@pytest.mark.parametrize(
    ("design", "budgets", "depth", "width"),
    [
        (THRESHOLD_256, [256, 255, 129, 256, 200, 3, 256, 256, 256], 7, 32),
        (THRESHOLD_256, [256] * 6, 15, 13),
        (THRESHOLD_256, [256, 0, 1, 256], 2, 64),
        (THRESHOLD_1024, [1024, 1023, 1024], 7, 32),
        (THRESHOLD_1024, [1024, 900], 3, 64),
    ],
    ids=name_of,
)
def test_counting(design: TreeDesign, budgets: list[int], depth: int, width: int) -> None:
    case = case_of(np.random.default_rng(width), depth=depth, width=width, budgets=budgets)
    assert_equals_core(build(case, design.max_budget + 1, design, seed=depth), case)


def uniform(score: int, depth: int, width: int, budget: int) -> Case:
    """Rows without any preference: every prefix of a depth ties with all others."""
    shape = (1, depth, width)
    one = np.ones(1, np.int32)
    token = np.arange(depth * width, dtype=np.int32).reshape(shape)
    return Case(token, np.full(shape, score, np.int32), 9 * one, 5 * one, budget * one)


@pytest.mark.parametrize("score", [0, -1, -(1 << 22), -(1 << 26), -(1 << 27) + 1, ABSENT + 1])
@pytest.mark.parametrize("design", [POP_64, THRESHOLD_256, THRESHOLD_1024], ids=name_of)
def test_mass_ties_neither_overflow_nor_lose_their_order(design: TreeDesign, score: int) -> None:
    case = uniform(score, 15, 64, design.max_budget)
    assert_equals_core(build(case, design.max_budget + 1, design), case)


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
@pytest.mark.parametrize(("depth", "width"), [(0, 0), (0, 8), (5, 0)])
def test_without_candidates_only_roots_are_left(design: TreeDesign, depth: int, width: int) -> None:
    case = case_of(np.random.default_rng(0), depth=depth, width=width, budgets=[4, 0])
    assert_equals_core(build(case, 5, design), case)


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
@pytest.mark.parametrize("num_nodes", [1, 2, 8, 31, 32, 33])
def test_trees_smaller_than_the_design_is_made_for(design: TreeDesign, num_nodes: int) -> None:
    # The budgets differ, and what is beyond the buffers' N - 1 or below 0 is cut.
    budgets = [num_nodes - 1, num_nodes // 2, 0, 5000, -3]
    rng = np.random.default_rng(num_nodes)
    case = case_of(rng, depth=6, width=9, budgets=budgets, kinds=("tie", "mix", "absent"))
    cut = np.clip(case.budgets, 0, num_nodes - 1).astype(np.int32)
    wanted = Case(case.token, case.score, case.roots, case.base, cut)
    assert_equals_core(build(case, num_nodes, design), wanted)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("design", [POP_128, THRESHOLD_256], ids=name_of)
def test_the_order_in_which_threads_run_never_shows(design: TreeDesign, seed: int) -> None:
    case = case_of(
        np.random.default_rng(seed), depth=7, width=24, budgets=[128] * 3, kinds=("tie", "grid")
    )
    assert_equals_core(build(case, 129, design, seed=seed), case)


def test_unrolling_changes_nothing() -> None:
    defines = (("KDRAY_POP_UNROLL", 32),)
    design = replace(POP_64, defines=defines)
    case = case_of(np.random.default_rng(5), depth=7, width=16, budgets=[64, 33] * len(KINDS))
    assert_equals_core(build(case, 65, design), case)


@pytest.mark.parametrize(("made_of", "threads"), [(THRESHOLD_256, 256), (THRESHOLD_1024, 1024)])
def test_another_number_of_threads_changes_nothing(made_of: TreeDesign, threads: int) -> None:
    limit = made_of.max_budget
    defines = ((f"KDRAY_THRESHOLD_THREADS_{limit}", threads),)
    design = TreeDesign(entry=made_of.entry, max_budget=limit, threads=threads, defines=defines)
    case = case_of(np.random.default_rng(6), depth=15, width=20, budgets=[limit, 100, limit] * 3)
    assert_equals_core(build(case, limit + 1, design), case)


@pytest.mark.parametrize("design", [POP_32, POP_128, THRESHOLD_256], ids=name_of)
def test_what_nobody_asked_for_is_not_written(design: TreeDesign) -> None:
    case = case_of(np.random.default_rng(7), depth=7, width=16, budgets=[31, 16])
    assert_equals_core(build(case, 32, design, position=False, links=False), case)


def test_unaligned_rows_of_an_odd_width() -> None:
    case = case_of(np.random.default_rng(8), depth=7, width=12, budgets=[32, 9, 31])
    shifted = Case(
        *(
            np.concatenate([a.ravel()[:1], a.ravel()])[1:].reshape(a.shape)
            for a in (case.token, case.score)
        ),
        case.roots,
        case.base,
        case.budgets,
    )
    assert shifted.score.ctypes.data % 16 != 0 or shifted.token.ctypes.data % 16 != 0
    assert_equals_core(build(shifted, 33, POP_32), case)


def batch(requests: int, depth: int, width: int) -> tuple[Candidates, torch.Tensor, torch.Tensor]:
    rows = torch.zeros(requests, depth, width, dtype=torch.int32)
    one = torch.ones(requests, dtype=torch.int32)
    return Candidates(token=rows, score=rows), one, one


def test_a_batch_may_be_empty() -> None:
    built = build_trees(simt_loader(), *batch(0, 7, 16), 8, links=True)
    assert built.trees.mask.shape == (0, 9, 1)


@pytest.mark.parametrize(
    ("shape", "max_budget", "message"),
    [((1, 16, 4), 8, "15 depths"), ((1, 3, 65), 8, "of 64"), ((1, 3, 4), 1025, "at most 1024")],
)
def test_what_does_not_fit_is_refused(shape: Sequence[int], max_budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_trees(simt_loader(), *batch(*shape), max_budget)


def test_a_design_refuses_larger_trees() -> None:
    given, roots, budgets = batch(1, 3, 4)
    out = empty_trees(1, 34, torch.device("cpu"))
    with pytest.raises(ValueError, match="1 to 33 nodes, not 34"):
        build_trees_into(simt_loader(), out, given, roots, budgets, design=POP_32)


def test_designs_cover_every_budget() -> None:
    assert all(choose_design(budget).max_budget >= budget for budget in range(1025))
