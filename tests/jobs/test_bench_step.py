from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_step
import pytest
import step_parts
import step_rows
import step_time
import torch
from step_floor import Ceilings, Work, floor_ms
from step_predict import HITS, OFF_PATH, RTX, SIBLINGS, MeasuredRound, predictions, sum_ms
from step_rank import Rank, WatchedOps, temporary_folders
from step_ranks import Loopback
from step_rows import StepCase, requests_of
from step_tables import FAR_ROWS, whole_tables
from step_time import Span, last_half, op_of, time_by_op
from step_travel import Mutable
from torch import Tensor

from kdray.core.acceptance import AcceptanceProfile
from kdray.core.plan import DeviceVerified, Verified
from kdray.kernels.ops import RoutingRule
from kdray.kernels.reference import ReferenceOps
from kdray.model.parallel import Shard
from kdray.model.target import TargetModel
from tests.thread_ranks import Meeting, ThreadCollectives

CPU = torch.device("cpu")
ASSUMED = AcceptanceProfile.of(HITS, SIBLINGS, OFF_PATH, len(HITS))
SMALL = ["--device", "cpu", "--tiny", "--layers", "2", "--kv-tokens", "4000", "--page-size", "16",
         "--round-context", "40", "--replays", "2", "--seconds", "1e9"]  # fmt: skip


def rows_of(text: str, part: str) -> list[dict[str, Any]]:
    record = json.loads(text.splitlines()[-1])
    assert record["name"] == "step"
    return [row for row in record["rows"] if row["params"]["part"] == part]


def test_every_part_of_a_looped_back_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--tokens", "1", "33", "512", "--contexts", "0", "64", "--streams", "1", "2",
             "--drafts", "3", "7", "--round", "2x7", "--out", str(tmp_path)]  # fmt: skip
    assert bench_step.main(words) == 0
    out = capsys.readouterr().out
    assert "memory of rank 0 of 8" in out and "prediction: Tokens a second" in out
    steps = rows_of(out, "step")
    trees = [row for row in steps if row["params"]["way"] == "tree"]
    assert len(trees) == 6 and len(steps) == 10  # 512 rows also as prompts
    for row in steps:
        metrics, params = row["metrics"], row["params"]
        assert metrics["fraction"] == pytest.approx(metrics["floor_ms"] / metrics["ms"])
        assert 3 <= metrics["distinct_experts"] <= 8
        assert params["requests"] * params["nodes"] == params["tokens"]
    deep, flat = (next(r for r in trees if r["params"]["context"] == c) for c in (64, 0))
    assert deep["metrics"]["floor_ms"] > flat["metrics"]["floor_ms"]
    [engine] = rows_of(out, "engine")
    assert engine["metrics"]["tokens_per_s"] > 0 and engine["metrics"]["accept_length"] >= 1
    rounds, predicted = rows_of(out, "round"), rows_of(out, "prediction")
    assert len(rounds) == len(predicted) == 10 and len(rows_of(out, "draft")) == 4
    for row in rounds:
        verbs = ("draft", "build", "verify", "accept", "commit")
        assert all(row["metrics"][f"{verb}_ms"] >= 0 for verb in verbs)
    assert {row["params"]["mode"] for row in predicted} == {"plain", "chain", "tree"}
    written = json.loads((tmp_path / "step-cpu.json").read_text())
    assert len(written["rows"]) == len(json.loads(out.splitlines()[-1])["rows"])


def test_a_row_that_fails_is_told_and_the_others_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sometimes(rank: Rank, case: StepCase) -> Callable[[], object]:
        if case.tokens == 4:
            raise ValueError("such a row")
        return step_rows.step_of(rank, case)

    monkeypatch.setattr(step_parts, "step_of", sometimes)
    words = [*SMALL, "--parts", "step", "--tokens", "1", "4", "8", "--contexts", "0"]
    assert bench_step.main(words) == 1
    out = capsys.readouterr().out
    assert [row["params"]["tokens"] for row in rows_of(out, "step")] == [1, 8]
    assert "FAILED  step StepCase(way='tree', tokens=4" in out and "such a row" in out


def test_no_row_is_begun_late(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--parts", "step", "--tokens", "1", "--contexts", "0", "--seconds", "0"]
    assert bench_step.main(words) == 1
    assert "not begun, --seconds 0 are over" in capsys.readouterr().out


def test_what_cannot_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_step.main([*SMALL, "--kv-tokens", str(10**13)]) == 1
    assert "does not fit" in capsys.readouterr().err


TWO = [*SMALL, "--tp", "2", "--ranks", "2", "--streams", "2", "--drafts", "3"]


@pytest.fixture
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # ranks in processes of their own share the cores


@pytest.mark.usefixtures("one_thread_each")
def test_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TWO, "--tokens", "1", "512", "--contexts", "16", "--replays", "1"]
    assert bench_step.main(words) == 0
    out = capsys.readouterr().out
    assert len(rows_of(out, "round")) == 3 and len(rows_of(out, "draft")) == 1
    assert not rows_of(out, "engine") and not rows_of(out, "prediction")
    steps = rows_of(out, "step")
    assert [row["params"]["way"] for row in steps] == ["tree", "tree", "prompt", "pass"]
    for row in steps:
        metrics = row["metrics"]
        assert metrics["travel_ms"] == pytest.approx(metrics["ms"] - metrics["local_ms"])
        assert metrics["travel_share"] == pytest.approx(metrics["travel_ms"] / metrics["ms"])
        assert 3 <= metrics["local_distinct_experts"] <= 8


@pytest.mark.usefixtures("one_thread_each")
def test_two_ranks_stop_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_step.main([*TWO, "--parts", "step", "--tokens", "1", "--seconds", "0"]) == 1
    out = capsys.readouterr().out
    assert out.count("not begun, --seconds 0 are over") == 3  # contexts, told once each


def test_collectives_are_left_out_for_a_while() -> None:
    meeting = Meeting(2)
    ranks = [Mutable(ThreadCollectives(meeting, rank), 2) for rank in range(2)]  # type: ignore[arg-type]
    x = torch.arange(8.0).view(2, 4)

    def sums(rank: int) -> list[Tensor]:
        own = x + rank
        with ranks[rank].left_out():
            alone = [ranks[rank].all_reduce(own), ranks[rank].broadcast(own)]
            shapes = [ranks[rank].all_gather(own).shape, ranks[rank].deal_rows(own).shape]
        assert shapes == [(2, 8), (1, 8)]
        return [*alone, ranks[rank].all_reduce(own), ranks[rank].deal_rows(own)]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(sums, range(2))
    assert torch.equal(first[0], x) and torch.equal(second[0], x + 1)
    assert torch.equal(second[1], x + 1)
    assert torch.equal(first[2], 2 * x + 1) and torch.equal(second[2], 2 * x + 1)
    assert torch.equal(second[3], torch.cat([x[1:], x[1:] + 1], dim=1))


def test_the_second_of_two_runs() -> None:
    first = [Span("all_reduce", 0, 900), Span("gemm", 900, 1000)]
    second = [Span("all_reduce", 1100, 1105), Span("gemm", 1105, 1200)]
    assert last_half([*second, *first]) == second and last_half([]) == []


def test_numbers_that_run_away_are_refused() -> None:
    token = torch.zeros(1, 2, dtype=torch.int32)
    fine = DeviceVerified(token=token, dead=token, features=token)
    step_rows.refuse_broken(fine)
    step_rows.refuse_broken(Verified(token=token, features=token))
    for broken in (
        replace(fine, dead=token + 1),
        Verified(token=token, features=token, broken=frozenset({0})),
    ):
        with pytest.raises(ValueError, match="finite"):
            step_rows.refuse_broken(broken)


def test_loopback_gives_the_shapes_of_other_ranks() -> None:
    looped, x = Loopback(4), torch.arange(24.0).view(8, 3)
    assert torch.equal(looped.all_reduce(x), x)
    assert looped.all_gather(x).shape == (8, 12)
    assert torch.equal(looped.deal_rows(x), torch.cat([x[:2]] * 4, dim=1))


def test_watched_ops_tell_what_was_chosen_while_watched() -> None:
    ops = WatchedOps(ReferenceOps(CPU))  # type: ignore[arg-type]
    rule = RoutingRule(top_k=2, num_groups=1, top_groups=1, normalize=True, scale=1.0)
    logits, bias = torch.randn(5, 8), torch.zeros(8)
    ops.route_experts(logits, bias, rule)
    with ops.watch() as chosen:
        expert, _ = ops.route_experts(logits, bias, rule)
    ops.route_experts(logits, bias, rule)
    assert len(chosen) == 1 and torch.equal(chosen[0], expert)
    assert step_time.distinct_experts(chosen) == [len(set(expert.flatten().tolist()))]


def test_the_far_rows_of_a_head_never_win() -> None:
    with temporary_folders(layers=2, tiny=True) as (folder, _):
        ops = ReferenceOps(CPU)
        target = TargetModel.load(folder, ops=ops, shard=Shard(1, 4), load_format="dummy")  # type: ignore[arg-type]
        tables = whole_tables(target, folder)
    own = slice(128, 256)
    assert torch.equal(tables.embedding[own], target.embedding)
    assert torch.equal(tables.head[own], target.head)
    far = torch.cat([tables.head[:128], tables.head[256:]])
    assert 0 < far.abs().max() < target.head.abs().max() / 2
    assert float(far.std() / target.head.std()) == pytest.approx(FAR_ROWS, rel=0.05)


@pytest.mark.parametrize(
    ("tokens", "context", "pages", "wanted"),
    [(1, 0, 10, 1), (65, 99, 10, 1), (128, 0, 99, 8), (2048, 0, 999, 64), (2048, 640, 100, 4)],
)
def test_rows_are_shared_by_as_many_requests_as_fit(
    tokens: int, context: int, pages: int, wanted: int
) -> None:
    requests = requests_of(tokens, context, pages, page_size=64)
    assert requests == wanted and tokens % requests == 0


def test_kernels_that_overlap_are_counted_once() -> None:
    spans = [
        Span("skinny_gemm", 0, 1_000_000),
        Span("void moe_w4a16<..>", 500_000, 3_000_000),  # launched ahead
        Span("rms_norm", 600_000, 900_000),  # wholly within another
        Span("ncclDevKernel_AllReduce", 4_000_000, 5_000_000),
    ]
    found = time_by_op(spans)
    assert found == {"moe": 2.0, "gemm": 1.0, "between": 1.0, "collectives": 1.0}
    assert sum(found.values()) == 5.0 and time_by_op([]) == {}


def test_kernels_belong_to_ops() -> None:
    names = ("nvjet_tst_128x64", "verify_attention", "plan_attention", "sort_rows", "rope_cache",
             "topk_partial", "vectorized_elementwise_kernel", "draw_tokens")  # fmt: skip
    ops = ["gemm", "attention", "attention", "moe", "rope", "topk", "rest", "draw"]
    assert [op_of(name) for name in names] == ops


def test_the_assumed_chain_accepts_what_was_published() -> None:
    assert ASSUMED.length("chain", 8) == pytest.approx(2.66, abs=0.01)
    assert ASSUMED.length("tree", 16) > ASSUMED.length("tree", 8) > 2.66


def test_a_prediction_follows_its_formula() -> None:
    here = Ceilings(bytes_per_us=4e6, flops_per_us=700e6)
    measured = MeasuredRound(
        mode="chain", streams=1, nodes=8, round_ms=5.0, draft_ms=2.0, verify_ms=2.5, rest_ms=0.5,
        verify=[Work("matrices", 4e9, 1e9)], draft=[Work("draft", 4e9, 1e9)],
        sums=[(123, 8 * 14336), (14, 9 * 14336), (2, 0)],
    )  # fmt: skip
    assert floor_ms(measured.verify, here) == pytest.approx(1.0)
    slower = here.bytes_per_us / RTX.bytes_per_us
    sums = 123 * sum_ms(8 * 14336) + 14 * sum_ms(9 * 14336) + 2 * sum_ms(0)
    wanted = slower * (2.5 + 2.0) + 0.5 + sums
    found = predictions(measured, ASSUMED, here)
    assert found["rtx_round_ms"] == pytest.approx(wanted)
    late = 2.5 + 2.0 - 2.0  # of both, of whose floors each is 1.0 here
    at_best = 2.0 * slower + late + 0.5 + sums
    assert found["rtx_round_ms_at_best"] == pytest.approx(at_best) and at_best < wanted
    assert found["tokens_per_s_here"] == pytest.approx(1e3 * 2.66 / 5.0, rel=1e-2)
    assert found["public_plain_tokens_per_s"] == 92.0
    assert sum_ms(14336) == pytest.approx(7e-3 + 14336 / 3.3e6)
