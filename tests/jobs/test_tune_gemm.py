"""What the tuner tries and what it takes, by made-up times."""

from __future__ import annotations

from pathlib import Path

import pytest
import tune_gemm
from bench_gemm import MATRICES, Matrix
from tune_gemm import Trial, best_runs, choose, key_of, trials_of

from kdray.kernels.gemm_cost import estimated_us
from kdray.kernels.gemm_plan import TOKEN_TILES, GemmPlan, GemmShape, fits

MATRIX = Matrix("small", GemmShape(1024, 2048))


def plan(runs: int, warps_m: int = 1) -> GemmPlan:
    return GemmPlan(1, warps_m, runs, 1, 4)


def times_of(seconds: dict[tuple[int, int], float]) -> dict[Trial, float]:
    """By (runs, tiles)."""
    return {Trial(MATRIX, tiles, plan(runs)): us for (runs, tiles), us in seconds.items()}


def test_runs_without_a_plan_for_all_tile_counts_are_not_taken() -> None:
    times = times_of({(1, tiles): 9.0 for tiles in TOKEN_TILES} | {(4, 1): 1.0, (4, 2): 1.0})
    assert best_runs(times) == 1


def test_the_least_slowdown_over_all_tile_counts_decides() -> None:
    even = {(2, tiles): 3.0 for tiles in TOKEN_TILES}
    uneven = {(4, 1): 1.5, (4, 2): 2.9, (4, 4): 3.1, (4, 8): 3.2}
    times = times_of(even | uneven)
    assert best_runs(times) == 4
    slower = Trial(MATRIX, 8, plan(4, warps_m=2))
    runs: tune_gemm.Runs = {(1, 1, 1): 1}
    plans: tune_gemm.Plans = {}
    choose(MATRIX, {**times, slower: 9.0}, runs, plans)
    assert runs == {(1, 1, 1): 1, key_of(MATRIX.shape): 4}
    assert plans == {(*key_of(MATRIX.shape), tiles): (1, 1, 4, 1, 4) for tiles in TOKEN_TILES}


@pytest.mark.parametrize("matrix", [m for m in MATRICES if not m.gated], ids=lambda m: m.name)
def test_what_is_tried_can_be_taken(matrix: Matrix) -> None:
    trials = list(trials_of(matrix, most_runs=3, plans=2))
    times = {t: estimated_us(matrix.shape, t.tiles, t.plan) for t in trials}
    assert all(fits(t.plan, t.tiles) and us > 0 for t, us in times.items())
    assert len({t.plan.runs for t in trials}) <= 3
    runs: tune_gemm.Runs = {}
    plans: tune_gemm.Plans = {}
    choose(matrix, times, runs, plans)
    assert {GemmPlan(*fields).runs for fields in plans.values()} == set(runs.values())


def test_a_table_is_written_over_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.py"
    path.write_text(Path(tune_gemm.gemm_table.__file__).read_text())
    monkeypatch.setattr(tune_gemm.gemm_table, "__file__", str(path))
    for runs in (2, 4):
        tune_gemm.write(tune_gemm.as_text({(64, 8, 1): runs}, {(64, 8, 1, 1): (1, 1, runs, 1, 4)}))
        names: dict[str, object] = {}
        exec(path.read_text(), names)
        assert names["RUNS"] == {(64, 8, 1): runs}
        assert names["PLANS"] == {(64, 8, 1, 1): (1, 1, runs, 1, 4)}
