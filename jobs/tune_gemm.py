#!/usr/bin/env python3
"""Find how skinny_gemm's work is best cut for a rank's matrices of Kimi K2.6, and write the table.

    python jobs/tune_gemm.py            # prints the table
    python jobs/tune_gemm.py --write    # into kdray/kernels/gemm_table.py, after each matrix

For every matrix the numbers of runs that the estimate likes best are tried, and for each of them
the plans it likes best are timed at the most tokens of each tile count. The number of runs is one
for all tokens, since bits hang on it: taken is the one whose slowdowns against the best for each
tile count are least in sum. Kernels are compiled by all cores before anything is timed. Matrices
that are not tuned keep what the table has.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_gemm import MATRICES, NAMES, Matrix, product, rows_of, weights_of
from gpu_timing import graph_us, need_gpu

from kdray.kernels import cuda_gemm, gemm_table
from kdray.kernels.cubin_cache import CubinCache
from kdray.kernels.cuda_gemm import CudaGemm
from kdray.kernels.gemm_cost import estimated_us
from kdray.kernels.gemm_plan import (
    TOKEN_TILE,
    TOKEN_TILES,
    GemmPlan,
    GemmShape,
    candidates,
)
from kdray.kernels.gemm_table import MOST_RUNS, MOST_STEPS
from kdray.kernels.loader import KernelLoader
from kdray.kernels.nvrtc import KernelSource, read_source


class Trial(NamedTuple):
    matrix: Matrix
    tiles: int
    plan: GemmPlan

    def source(self, arch: str) -> KernelSource:
        name = "skinny_gemm_pair" if self.matrix.beside else "skinny_gemm"
        return read_source(name, arch, self.defines())

    def defines(self) -> dict[str, str | int]:
        steps = self.matrix.shape.steps
        if self.matrix.beside:
            return cuda_gemm.pair_defines(self.plan, self.tiles, steps, 1, self.matrix.dtype)
        return cuda_gemm.defines(
            self.plan, self.tiles, steps, 1, self.matrix.gated, self.matrix.dtype
        )


Times = Mapping[Trial, float]
Ranked = Mapping[int, Sequence[GemmPlan]]  # tiles of tokens: plans, the best first
Runs = dict[tuple[int, int, int], int]
Plans = dict[tuple[int, int, int, int], tuple[int, int, int, int, int]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrices", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--runs", type=int, default=3, help="numbers of runs tried")
    parser.add_argument("--plans", type=int, default=4, help="timed of each kind")
    parser.add_argument("--replays", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="into gemm_table.py")
    arguments = parser.parse_args(argv)
    need_gpu()
    loader = KernelLoader(torch.device("cuda"))
    # Gated products are cut as the plain ones of their shape.
    chosen = [m for m in MATRICES if m.name in arguments.matrices and not m.gated]
    trials = {m: list(trials_of(m, arguments.runs, arguments.plans)) for m in chosen}
    compile_all([trial for some in trials.values() for trial in some], loader.arch)
    runs, plans = dict(gemm_table.RUNS), dict(gemm_table.PLANS)
    for matrix in chosen:
        times = timed(loader, trials[matrix], arguments.replays)
        choose(matrix, times, runs, plans)
        if arguments.write:
            write(as_text(runs, plans))
    print(as_text(runs, plans))
    return 0


def choose(matrix: Matrix, times: Times, runs: Runs, plans: Plans) -> None:
    """The matrix's rows, into both tables; says what they cost."""
    key, count = key_of(matrix.shape), best_runs(times)
    runs[key] = count
    for tiles in TOKEN_TILES:
        best = best_of(times, tiles, count)
        plans[*key, tiles] = astuple(best.plan)
        us, fewest = times[best], fewest_us(times, tiles)
        print(f"{matrix.name}  tiles {tiles}  {best.plan}  us {us:.2f} of {fewest:.2f}")
    print(f"    {key}: {count},")
    for tiles in TOKEN_TILES:
        print(f"    {(*key, tiles)}: {plans[*key, tiles]},", flush=True)


def key_of(shape: GemmShape) -> tuple[int, int, int]:
    return shape.inputs, shape.outputs, shape.heads


def trials_of(matrix: Matrix, most_runs: int, plans: int) -> Iterator[Trial]:
    """The plans of each tile count that should be quick, of the numbers of runs that should."""
    ranked = {runs: plans_of(matrix.shape, runs) for runs in run_counts(matrix)}
    whole = {runs: by_tiles for runs, by_tiles in ranked.items() if all(by_tiles.values())}
    for runs in sorted(whole, key=lambda runs: guess(matrix.shape, whole[runs]))[:most_runs]:
        for tiles, quick in whole[runs].items():
            yield from (Trial(matrix, tiles, plan) for plan in quick[:plans])


def run_counts(matrix: Matrix) -> Iterator[int]:
    """Powers of two that leave a run some steps, not too many, and the device enough of them; of
    two matrices in one launch the one that the first has alone."""
    shape, runs = matrix.shape, 1
    if matrix.beside:
        yield gemm_table.runs_of(GemmShape(shape.inputs, shape.outputs - matrix.beside))
        return
    while runs <= MOST_RUNS and 2 * runs <= shape.steps:
        if shape.steps <= runs * MOST_STEPS and runs * shape.tiles * shape.heads >= 128:
            yield runs
        runs *= 2


def plans_of(shape: GemmShape, runs: int) -> Ranked:
    """Empty for a tile count that has no plan of so many runs, which nobody may choose then."""
    return {
        tiles: sorted(
            candidates(shape, runs, tiles), key=lambda plan: estimated_us(shape, tiles, plan)
        )
        for tiles in TOKEN_TILES
    }


def guess(shape: GemmShape, ranked: Ranked) -> float:
    """Product of what the best plans should take: as many runs for all tokens."""
    return math.prod(estimated_us(shape, tiles, plans[0]) for tiles, plans in ranked.items())


def compile_all(trials: Sequence[Trial], arch: str) -> None:
    """Into the cache that the loader reads."""
    sources = {trial.source(arch) for trial in trials}
    print(f"{len(trials)} trials, {len(sources)} kernels to compile", flush=True)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for _ in pool.map(CubinCache().path, sources, chunksize=4):
            pass


def timed(loader: KernelLoader, trials: Sequence[Trial], replays: int) -> Times:
    """Microseconds of each trial of one matrix."""
    weights, times = weights_of(trials[0].matrix), {}
    for trial in trials:
        gemm = CudaGemm(loader, plan=trial.plan)
        x = rows_of(trial.matrix, TOKEN_TILE * trial.tiles)
        calls = [product(gemm, trial.matrix, x, weight) for weight in weights]
        times[trial] = statistics.median(graph_us(calls, replays=replays, at_least=20))
        print(f"{trial.matrix.name}  tiles {trial.tiles}  {trial.plan}  us {times[trial]:.2f}")
    return times


def best_of(times: Times, tiles: int, runs: int) -> Trial:
    return min(
        (trial for trial in times if trial.tiles == tiles and trial.plan.runs == runs),
        key=lambda trial: times[trial],
    )


def fewest_us(times: Times, tiles: int) -> float:
    return min(us for trial, us in times.items() if trial.tiles == tiles)


def best_runs(times: Times) -> int:
    """Of those that were timed for every tile count."""

    def slowdown(runs: int) -> float:
        return sum(
            times[best_of(times, tiles, runs)] / fewest_us(times, tiles) for tiles in TOKEN_TILES
        )

    timed_for: dict[int, set[int]] = {}
    for trial in times:
        timed_for.setdefault(trial.plan.runs, set()).add(trial.tiles)
    whole = [runs for runs, tiles in timed_for.items() if tiles == set(TOKEN_TILES)]
    return min(whole, key=slowdown)


def as_text(runs: Runs, plans: Plans) -> str:
    """The two tables as they stand in gemm_table.py."""
    counts = "".join(f"    {key}: {count},\n" for key, count in sorted(runs.items()))
    rows = "".join(f"    {key}: {plan},\n" for key, plan in sorted(plans.items()))
    return (
        f"RUNS: dict[tuple[int, int, int], int] = {{\n{counts}}}\n"
        "# (inputs, outputs, heads, tiles of 8 tokens): a plan's fields.\n"
        "PLANS: dict[tuple[int, int, int, int], tuple[int, int, int, int, int]] = "
        f"{{\n{rows}}}\n"
    )


def write(text: str) -> None:
    path = Path(gemm_table.__file__)
    old = path.read_text()
    pattern = r"RUNS: dict.*?\nPLANS: .*?\}\n"
    new, found = re.subn(pattern, lambda _: text, old, flags=re.DOTALL)
    if found != 1:
        raise SystemExit(f"no tables in {path}")
    path.write_text(new)


if __name__ == "__main__":
    sys.exit(main())
