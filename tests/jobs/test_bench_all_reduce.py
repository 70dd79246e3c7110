"""jobs/bench_all_reduce.py without GPUs: its messages, its check, and a run of two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import bench_all_reduce
import pytest
import torch
from bench_all_reduce import BF16, Message, Ranks, Row, bench, is_sum, messages_of, parse, part_of
from torch import Tensor

from kdray.errors import LinkError
from kdray.kernels.cuda_reduce import MAX_NORM_ROWS, OneShotReduce
from kdray.kernels.ops import Norm, load_ops
from kdray.model.parallel import Shard
from tests.thread_ranks import Meeting, ThreadCollectives

CPU = torch.device("cpu")
OPS = load_ops("cpu")
ON_CPU = ["--device", "cpu"]


@dataclass(frozen=True)
class InPlace(ThreadCollectives):
    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(super().all_reduce(x))


@dataclass
class FakeKernel:
    """Whole vectors up to 64 bytes, summed in float32 in the ranks' order.

    spoil goes over a sum, spoil_norm over a norm.
    """

    meeting: Meeting
    rank: int
    spoil: Callable[[int, Tensor], object] = lambda rank, x: None
    spoil_norm: Callable[[int, Tensor], object] = lambda rank, x: None
    sizes: set[int] = field(default_factory=set)

    def takes(self, x: Tensor) -> bool:
        return x.numel() % 8 == 0 and x.numel() <= 32

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sizes.add(x.numel())
        x.copy_(torch.stack(self.meeting.exchange(self.rank, x)).float().sum(0))
        self.spoil(self.rank, x)
        return x

    def takes_norm(self, part: Tensor, x: Tensor, norm: Norm) -> bool:
        return self.takes(part)

    def all_reduce_norm(self, part: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        total, normed = OPS.add_rms_norm(x, self.all_reduce(part.clone()), norm)
        self.spoil_norm(self.rank, normed)
        return total, normed


def on_all(
    message: Message, *, size: int = 3, limit: int = 16, **kernel: Callable[[int, Tensor], object]
) -> list[Row]:
    """bench() on threads that are ranks."""
    meeting = Meeting(size)

    def be(rank: int) -> Row:
        own = cast(OneShotReduce, FakeKernel(meeting, rank, **kernel))
        nccl = InPlace(meeting, rank)
        ranks = Ranks(shard=Shard(rank, size), device=CPU, nccl=nccl, ops=OPS, own=own, limit=limit)
        return bench(ranks, message, calls=2, replays=3)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(be, range(size)))


def test_messages_are_a_step_s_rows_and_some_of_other_lengths() -> None:
    messages = messages_of(parse([*ON_CPU, "--tp", "8"]))
    rows = {m.rows: m.num_bytes for m in messages if m.width == 7168}
    assert list(rows) == [1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 128, 512, 2048]
    assert rows[1] == 14336 and rows[2048] == 2048 * 14336
    others = [m for m in messages if m.width != 7168]
    assert len(messages) == len(rows) + len(others)
    assert any(m.num_bytes % 16 for m in others) and any(m.num_bytes % 16 == 0 for m in others)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tp", "1"], "--tp must be 2 to 8"),
        (["--tp", "9"], "--tp must be 2 to 8"),
        (["--tp", "2", "--rows", "0"], "1 or more"),
        (["--tp", "2", "--replays", "0"], "1 or more"),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*ON_CPU, *words])
    assert says in capsys.readouterr().err


def test_fewer_gpus_than_ranks_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert parse([]).tp == 3
    with pytest.raises(SystemExit):
        parse(["--tp", "4"])
    assert "torch sees 3" in capsys.readouterr().err


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_are_right_but_for_their_roundings(size: int) -> None:
    message = Message(3, 7168)
    parts = [part_of(rank, message, CPU) for rank in range(size)]
    once = torch.stack(parts).float().sum(0).to(BF16)
    each_time = parts[0].clone()
    for part in parts[1:]:
        each_time += part
    assert is_sum(once, message, size, rounded_each_time=False)
    assert is_sum(each_time, message, size, rounded_each_time=True)
    assert size == 2 or not is_sum(each_time, message, size, rounded_each_time=False)
    for wrong in (once - parts[-1], once + parts[0], torch.full_like(once, torch.nan)):
        assert not is_sum(wrong, message, size, rounded_each_time=True)
    off = once.clone()
    off[1, 5] *= 1 + 2.0**-6
    assert not is_sum(off, message, size, rounded_each_time=False)


def test_a_message_is_summed_by_both_ways() -> None:
    first, *others = on_all(Message(1, 8))
    assert all(row.samples == first.samples for row in others)  # the slowest rank's everywhere
    assert set(first.samples) == {
        "front_us", "own_us", "own_pair_us", "nccl_us", "nccl_pair_us",
        "own_norm_us", "nccl_norm_us", "fused_us",
    }  # fmt: skip
    assert all(len(times) == 3 for times in first.samples.values())
    assert first.params == {
        "rows": 1, "numbers": 8, "bytes": 16, "tp": 3, "start_up": "own",
    }  # fmt: skip
    median = sorted(first.samples["own_us"])[1]
    assert first.extra["own_gbps"] == pytest.approx(16 / median / 1e3)
    assert first.extra["nccl_same_bits"] == 1


def test_what_the_kernel_does_not_take_or_is_too_slow_for_is_nccl_s() -> None:
    [slow, *_] = on_all(Message(2, 8))
    assert slow.params["start_up"] == "nccl" and "own_us" in slow.samples
    [other, *_] = on_all(Message(1, 7), limit=64)
    assert other.params["start_up"] == "nccl"
    assert set(other.samples) == {"front_us", "nccl_us", "nccl_pair_us"}
    assert set(other.extra) == {"nccl_gbps", "nccl_same_bits"}


def test_a_wrong_sum_ends_it() -> None:
    with pytest.raises(LinkError, match=r"wrong sum of .* by own"):
        on_all(Message(1, 8), spoil=lambda rank, x: x.mul_(1.5))


def test_a_kernel_that_gives_ranks_other_bits_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def a_last_bit(rank: int, x: Tensor) -> None:
        bits = x.view(torch.int16)
        bits[0, 3] ^= rank == 1

    monkeypatch.setattr(bench_all_reduce, "is_sum", lambda *_, **__: True)
    with pytest.raises(LinkError, match="different bits"):
        on_all(Message(1, 8), spoil=a_last_bit)


def test_a_norm_in_the_same_launch_of_other_bits_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.thread_ranks._TIMEOUT_S", 5.0)
    with pytest.raises(LinkError, match="other bits than in two"):
        on_all(Message(1, 8), spoil_norm=lambda rank, x: x[0, 5].add_(0.125))


def test_many_rows_and_rows_of_no_whole_vectors_have_no_norm_timed() -> None:
    [few, *_] = on_all(Message(MAX_NORM_ROWS, 8))
    assert {"nccl_norm_us"} == {name for name in few.samples if "norm" in name or "fused" in name}
    for message in (Message(MAX_NORM_ROWS + 1, 8), Message(2, 12)):
        [row, *_] = on_all(message)
        assert not any("norm" in name or "fused" in name for name in row.samples)


def test_two_ranks_over_gloo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ON_CPU, "--tp", "2", "--rows", "1", "3", "--hidden", "24", "--numbers", "7",
             "--calls", "2", "--replays", "2", "--out", str(tmp_path)]  # fmt: skip
    assert bench_all_reduce.main(words) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["name"] == "all-reduce" and record["config"]["start_up_bytes"] == 0
    assert record["config"]["start_up_norm_rows"] == 0
    assert [row["params"]["numbers"] for row in record["rows"]] == [7, 24, 72]
    for row in record["rows"]:
        metrics = row["metrics"]
        assert row["params"]["start_up"] == "nccl" and metrics["nccl_same_bits"] == 1
        assert metrics["nccl_us"] > 0 and "own_us" not in metrics
        assert ("nccl_norm_us" in metrics) == (row["params"]["numbers"] != 7)
    written = json.loads((tmp_path / "all-reduce-cpu.json").read_text())
    assert len(written["rows"]) == 3
