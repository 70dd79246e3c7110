"""build_tree on a GPU against core.tree, exactly: 100,000 random trees, and the awkward ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

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
    build_trees_into,
    empty_trees,
)
from kdray.kernels.loader import KernelLoader
from tests.kernels.tree_cases import KINDS, Arrays, Case, case_of, expected

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
UNWRITTEN = -77
TREES = ("token", "parent", "depth", "score", "mask", "num_nodes")
EXTRA = ("position", "first_child", "next_sibling")


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """A case on the device."""

    candidates: Candidates
    roots: torch.Tensor
    base: torch.Tensor
    budgets: torch.Tensor

    @classmethod
    def of(cls, case: Case) -> Given:
        token, score, roots, base, budgets = (
            torch.from_numpy(array).to(DEVICE)
            for array in (case.token, case.score, case.roots, case.base, case.budgets)
        )
        return cls(Candidates(token=token, score=score), roots, base, budgets)


@pytest.fixture(scope="module")
def workers() -> Iterator[Executor]:
    # Spawned, not forked: this process holds a CUDA context.
    count = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        yield pool


def buffers(requests: int, num_nodes: int, *, extra: bool = True) -> BuiltTrees:
    out = empty_trees(requests, num_nodes, DEVICE, position=extra, links=extra)
    for column in columns(out).values():
        column.fill_(UNWRITTEN)
    return out


def columns(built: BuiltTrees) -> dict[str, torch.Tensor]:
    found = {name: getattr(built.trees, name) for name in TREES}
    found |= {name: getattr(built, name) for name in EXTRA}
    return {name: column for name, column in found.items() if column is not None}


def run(
    loader: KernelLoader,
    given: Given,
    num_nodes: int,
    design: TreeDesign,
    *,
    extra: bool = True,
) -> BuiltTrees:
    out = buffers(len(given.roots), num_nodes, extra=extra)
    build_trees_into(
        loader,
        out,
        given.candidates,
        given.roots,
        given.budgets,
        base=given.base,
        design=design,
    )
    return out


def assert_equal(built: BuiltTrees, wanted: Arrays) -> None:
    for name, column in columns(built).items():
        found, right = column.cpu().numpy(), getattr(wanted, name)
        wrong = (found != right).reshape(len(right), -1).any(axis=1)
        assert not wrong.any(), (
            f"{name} of {int(wrong.sum())} requests, first {np.flatnonzero(wrong)[:5].tolist()}"
        )


def name_of(value: object) -> str | None:
    return value.entry.removeprefix("build_tree_") if isinstance(value, TreeDesign) else None


def random_batch(seed: int, requests: int, max_budget: int) -> tuple[Case, Arrays]:
    """A worker's part: rows of any kind and shape, budgets up to the limit, and their trees."""
    rng = np.random.default_rng(seed)
    depth, width = int(rng.integers(1, 16)), int(rng.integers(1, 65))
    lowest = max_budget if rng.random() < 0.5 else 0
    budgets = rng.integers(lowest, max_budget + 1, requests).tolist()
    kinds = [str(kind) for kind in rng.permutation(KINDS)]
    case = case_of(rng, depth=depth, width=width, budgets=budgets, kinds=kinds)
    return case, expected(case, 1 + max_budget)


@pytest.mark.parametrize(
    ("design", "batches", "requests"),
    [
        (POP_32, 500, 120),  # 60,000
        (POP_64, 200, 100),  # 20,000
        (POP_128, 200, 60),  # 12,000
        (THRESHOLD_256, 140, 50),  # 7,000
        (THRESHOLD_1024, 100, 10),  # 1,000: 100,000 in all
    ],
    ids=name_of,
)
def test_random_trees_equal_core(
    loader: KernelLoader, workers: Executor, design: TreeDesign, batches: int, requests: int
) -> None:
    limit = design.max_budget
    seeds = range(limit * 1000, limit * 1000 + batches)
    made = workers.map(random_batch, seeds, [requests] * batches, [limit] * batches, chunksize=4)
    for case, wanted in made:
        assert_equal(run(loader, Given.of(case), 1 + limit, design), wanted)


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
@pytest.mark.parametrize(
    ("depth", "width"), [(1, 1), (1, 64), (7, 16), (15, 64), (15, 1), (4, 5), (2, 33)], ids=str
)
def test_awkward_shapes(loader: KernelLoader, design: TreeDesign, depth: int, width: int) -> None:
    limit = design.max_budget
    budgets = [limit, limit - 1, limit, limit // 2, limit, 1, limit, 0, limit]
    rng = np.random.default_rng(depth * 64 + width)
    case = case_of(rng, depth=depth, width=width, budgets=budgets)
    built = run(loader, Given.of(case), 1 + limit, design)
    assert_equal(built, expected(case, 1 + limit))


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
@pytest.mark.parametrize("num_nodes", [1, 2, 8, 9, 16, 32, 33])
def test_trees_smaller_than_the_design_is_made_for(
    loader: KernelLoader, design: TreeDesign, num_nodes: int
) -> None:
    rng = np.random.default_rng(num_nodes)
    budgets = [num_nodes - 1, num_nodes // 2, 0, 5000, -3]
    case = case_of(rng, depth=6, width=9, budgets=budgets, kinds=("tie", "mix", "absent"))
    cut = np.clip(case.budgets, 0, num_nodes - 1).astype(np.int32)
    wanted = expected(Case(case.token, case.score, case.roots, case.base, cut), num_nodes)
    assert_equal(run(loader, Given.of(case), num_nodes, design), wanted)


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
@pytest.mark.parametrize(("depth", "width"), [(0, 0), (0, 8), (5, 0)], ids=str)
def test_without_candidates_only_roots_are_left(
    loader: KernelLoader, design: TreeDesign, depth: int, width: int
) -> None:
    case = case_of(np.random.default_rng(0), depth=depth, width=width, budgets=[4, 0])
    assert_equal(run(loader, Given.of(case), 5, design), expected(case, 5))


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
@pytest.mark.parametrize("score", [0, -1, -(1 << 22), -(1 << 26), -(1 << 27) + 1, ABSENT + 1])
def test_mass_ties(loader: KernelLoader, design: TreeDesign, score: int) -> None:
    limit = design.max_budget
    case = case_of(np.random.default_rng(1), depth=15, width=64, budgets=[limit, limit // 3, 1])
    case.score[:] = score
    assert_equal(run(loader, Given.of(case), 1 + limit, design), expected(case, 1 + limit))


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
@pytest.mark.parametrize("requests", [1, 64, 400])
def test_batches(loader: KernelLoader, design: TreeDesign, requests: int) -> None:
    # Many requests of few rows: what they share must not show.
    limit = min(design.max_budget, 48)
    case = case_of(
        np.random.default_rng(requests), depth=7, width=16, budgets=[limit] * min(requests, 9)
    )
    repeat = np.arange(requests) % len(case.roots)
    many = Case(*(getattr(case, name)[repeat] for name in Case.__slots__))
    wanted = expected(case, 1 + limit)
    all_wanted = Arrays(*(column[repeat] for column in wanted.columns().values()))
    assert_equal(run(loader, Given.of(many), 1 + limit, design), all_wanted)


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
def test_optional_outputs_may_be_left_out(loader: KernelLoader, design: TreeDesign) -> None:
    case = case_of(np.random.default_rng(2), depth=7, width=16, budgets=[31, 16, 31])
    built = run(loader, Given.of(case), 32, design, extra=False)
    assert_equal(built, expected(case, 32))


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
def test_without_a_base_positions_are_depths(loader: KernelLoader, design: TreeDesign) -> None:
    case = case_of(np.random.default_rng(3), depth=7, width=16, budgets=[31, 16, 31])
    given = Given.of(case)
    out = buffers(3, 32)
    build_trees_into(loader, out, given.candidates, given.roots, given.budgets, design=design)
    assert torch.equal(out.position, out.trees.depth)


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
def test_rows_that_are_not_aligned(loader: KernelLoader, design: TreeDesign) -> None:
    case = case_of(np.random.default_rng(4), depth=7, width=12, budgets=[32, 9, 31])
    given = Given.of(case)
    token, score = (
        torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view_as(rows)
        for rows in (given.candidates.token, given.candidates.score)
    )
    assert score.data_ptr() % 16 != 0
    moved = Given(Candidates(token=token, score=score), given.roots, given.base, given.budgets)
    assert_equal(run(loader, moved, 33, design), expected(case, 33))


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
def test_a_captured_build_reads_what_is_there_at_replay(
    loader: KernelLoader, design: TreeDesign
) -> None:
    limit = design.max_budget
    cases = [
        case_of(np.random.default_rng(seed), depth=7, width=24, budgets=budgets, kinds=KINDS)
        for seed, budgets in enumerate([[limit] * 9, [limit // 2] * 9, [0, 1, limit] * 3])
    ]
    given = Given.of(cases[0])
    out = run(loader, given, 1 + limit, design)  # loads the kernel before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build_trees_into(
            loader,
            out,
            given.candidates,
            given.roots,
            given.budgets,
            base=given.base,
            design=design,
        )
    for case in [*cases, cases[0]]:
        fresh = Given.of(case)
        given.candidates.token.copy_(fresh.candidates.token)
        given.candidates.score.copy_(fresh.candidates.score)
        for name in ("roots", "base", "budgets"):
            getattr(given, name).copy_(getattr(fresh, name))
        for column in columns(out).values():
            column.fill_(UNWRITTEN)
        graph.replay()
        assert_equal(out, expected(case, 1 + limit))


@pytest.mark.parametrize("design", DESIGNS, ids=name_of)
def test_it_runs_on_the_current_stream(loader: KernelLoader, design: TreeDesign) -> None:
    case = case_of(np.random.default_rng(5), depth=7, width=16, budgets=[32, 9, 31])
    given = Given.of(case)
    stale = given.candidates.score.clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        given.candidates.score.fill_(ABSENT)
        torch.cuda._sleep(20_000_000)
        given.candidates.score.copy_(stale)
        built = run(loader, given, 33, design)
    stream.synchronize()
    assert_equal(built, expected(case, 33))


@pytest.mark.parametrize(
    "design",
    [replace(POP_64, defines=(("KDRAY_POP_UNROLL", unroll),)) for unroll in (4, 16, 32)]
    + [
        replace(
            made_of,
            threads=threads,
            defines=((f"KDRAY_THRESHOLD_THREADS_{made_of.max_budget}", threads),),
        )
        for made_of, threads in (
            (THRESHOLD_256, 256),
            (THRESHOLD_1024, 256),
            (THRESHOLD_1024, 1024),
        )
    ],
    ids=lambda design: str(design.defines),
)
def test_compile_time_choices_change_nothing(loader: KernelLoader, design: TreeDesign) -> None:
    limit = design.max_budget
    case = case_of(np.random.default_rng(6), depth=15, width=32, budgets=[limit] * len(KINDS))
    assert_equal(run(loader, Given.of(case), 1 + limit, design), expected(case, 1 + limit))
