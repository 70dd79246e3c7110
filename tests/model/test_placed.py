"""Tensors that come through staging buffers are those of the file, whatever the blocks."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kdray.kernels.ops import load_ops
from kdray.model import checkpoint as checkpoint_module
from kdray.model import placed
from kdray.model.checkpoint import Checkpoint, Part
from kdray.model.manifest import bytes_to_read
from kdray.model.parallel import Shard
from kdray.model.placed import PlacedCheckpoint, Stage
from kdray.model.progress import LoadProgress
from kdray.model.stored import ShardFile
from kdray.model.target import TargetModel
from tests.model import random_kimi

CPU = torch.device("cpu")
PARTS = [
    (None, None),
    (slice(3, 11), None),
    (None, slice(8, 24)),
    (slice(5, 17), slice(3, 29)),
    (slice(4, 4), slice(0, 8)),
    (slice(None, 7), None),
]


@pytest.fixture(params=[1, 100, 1 << 20], ids=["a row a block", "some rows", "whole"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpoint_module, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(placed, "BLOCK_BYTES", request.param)
    yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "w": torch.randn(19, 32, generator=generator).bfloat16(),
        "f": torch.randn(19, 32, generator=generator),
        "i": torch.randint(-(2**31), 2**31 - 1, (19, 32), generator=generator).int(),
        "v": torch.randn(64, generator=generator),
        "s": torch.tensor(2.5),
        "cube": torch.randn(4, 3, 5, generator=generator),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def staged(
    checkpoint: Checkpoint, name: str, rows: slice | None, cols: slice | None
) -> torch.Tensor:
    """By the path of a GPU, whose buffers are host memory here."""
    cut = checkpoint.cut(name, rows, cols)
    out = torch.full(cut.shape, 77).to(cut.dtype)
    Stage(CPU).fill(cut, out)
    return out


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("name", ["w", "f", "i"])
@pytest.mark.parametrize(("rows", "cols"), PARTS)
def test_parts(folder: Path, name: str, rows: slice | None, cols: slice | None) -> None:
    checkpoint = Checkpoint.open(folder)
    whole = checkpoint.tensor(name)
    wanted = whole[rows or slice(None)][:, cols or slice(None)]
    for got in (
        checkpoint.tensor(name, rows, cols),
        staged(checkpoint, name, rows, cols),
        PlacedCheckpoint(checkpoint, CPU).tensor(name, rows, cols),
    ):
        assert got.is_contiguous() and torch.equal(got, wanted)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("name", ["v", "s", "cube"])
def test_vectors_scalars_and_more_dimensions(folder: Path, name: str) -> None:
    checkpoint = Checkpoint.open(folder)
    assert torch.equal(staged(checkpoint, name, None, None), checkpoint.tensor(name))


def test_broken_numbers_are_found_on_the_way_to_a_device(folder: Path) -> None:
    bad = torch.zeros(19, 32)
    bad[18, 31] = torch.nan
    save_file({"w": bad}, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(checkpoint_module.CheckpointError, match="tensor w holds numbers that are"):
        staged(checkpoint, "w", None, None)
    assert staged(checkpoint, "w", slice(0, 18), None).eq(0).all()


def test_only_what_is_needed_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int]] = []
    read = ShardFile.read_into

    def watched(self: ShardFile, target: memoryview, start: int) -> None:
        reads.append((start, len(target)))
        read(self, target, start)

    monkeypatch.setattr(ShardFile, "read_into", watched)
    checkpoint = Checkpoint.open(folder)
    start = checkpoint.find("f").start
    PlacedCheckpoint(checkpoint, CPU).tensor("f", slice(4, 6))
    assert reads == [(start + 4 * 128, 2 * 128)]


def test_the_system_knows_of_all_parts_before_one_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.find("w").shard.expect(0, 100)  # the system takes it
    calls: list[tuple[int, int] | str] = []
    monkeypatch.setattr(ShardFile, "expect", lambda _, start, end: calls.append((start, end)))
    monkeypatch.setattr(ShardFile, "read_into", lambda _, target, start: calls.append("read"))
    w, v = (checkpoint.find(name).start for name in "wv")
    parts = [Part("w", slice(2, 4)), Part("w", slice(3, 3)), Part("v")]
    monkeypatch.setattr(checkpoint_module, "refuse_broken_numbers", lambda *_: None)
    PlacedCheckpoint(checkpoint, CPU).several(parts)
    assert calls == [(w + 2 * 64, w + 4 * 64), (v, v + 256), "read", "read"]
    calls.clear()
    monkeypatch.setattr(placed, "BLOCK_BYTES", 200)
    PlacedCheckpoint(checkpoint, CPU).several(parts)
    assert calls == [(w + 2 * 64, w + 4 * 64), "read", "read"], "a long one is a stream by itself"


def test_what_was_read_longest_ago_leaves_the_page_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[tuple[int, int]] = []
    monkeypatch.setattr(ShardFile, "forget", lambda _, start, end: forgotten.append((start, end)))
    assert placed.behind_bytes() >= 4 << 30
    monkeypatch.setattr(placed, "behind_bytes", lambda: 2 * 128)
    checkpoint = Checkpoint.open(folder)
    start = checkpoint.find("f").start
    source = PlacedCheckpoint(checkpoint, CPU)
    for row in range(4):
        source.tensor("f", slice(row, row + 1))
    assert forgotten == [(start, start + 128), (start + 128, start + 256)]
    monkeypatch.undo()
    source.tensor("f")
    checkpoint.find("f").shard.forget(0, 100)  # the system takes it


def test_threads_read_at_the_same_time_and_count_every_byte(folder: Path) -> None:
    checkpoint, lock, counted = Checkpoint.open(folder), threading.Lock(), [0]

    def count(num_bytes: int) -> None:
        with lock:
            counted[0] += num_bytes

    source = PlacedCheckpoint(checkpoint, CPU, count)
    whole = checkpoint.tensor("w")
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda i: source.tensor("w", slice(i % 19, i % 19 + 1)), range(400)))
    assert all(torch.equal(row[0], whole[i % 19]) for i, row in enumerate(rows))
    assert counted[0] == 400 * 64


def test_several_parts_come_in_their_order(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    parts = [Part("w", slice(i, i + 2), slice(0, 8)) for i in range(17)] + [Part("s"), Part("v")]
    others = set(threading.enumerate())
    source = PlacedCheckpoint(checkpoint, CPU, threads=4)
    for got, wanted in zip(source.several(parts), checkpoint.several(parts), strict=True):
        assert torch.equal(got, wanted)
    with pytest.raises(checkpoint_module.CheckpointError, match="tensor x is missing"):
        source.several([Part("w"), Part("x")])
    readers = set(threading.enumerate()) - others
    source.close()
    assert readers and not any(reader.is_alive() for reader in readers)


def test_one_tensor_is_read_by_all_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "BLOCK_BYTES", 1)
    checkpoint = Checkpoint.open(folder)
    wanted = {name: checkpoint.tensor(name) for name in ("w", "v", "s", "cube")}
    source = PlacedCheckpoint(checkpoint, CPU, threads=4)
    for name, tensor in wanted.items():
        assert torch.equal(source.tensor(name), tensor)
    all_read, read = threading.Barrier(4, timeout=30), ShardFile.read_into

    def together(self: ShardFile, target: memoryview, start: int) -> None:
        all_read.wait()
        read(self, target, start)

    monkeypatch.setattr(ShardFile, "read_into", together)
    assert torch.equal(source.tensor("w", slice(3, 19)), wanted["w"][3:])
    source.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_by_several_threads_is_the_same(tmp_path: Path, ranks: int) -> None:
    folder = random_kimi.write(tmp_path / "k", "--shards", "2")
    shard = Shard(ranks - 1, ranks)
    one, many = (
        TargetModel.load(folder, ops=load_ops("cpu"), shard=shard, threads=n) for n in (1, 5)
    )
    for first, second in zip(one.layers, many.layers, strict=True):
        assert torch.equal(first.attention.down, second.attention.down)
        assert torch.equal(first.mlp.down, second.mlp.down)


def test_what_a_load_reads_is_what_was_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_kimi.write(tmp_path / "k", "--shards", "2")
    read = [0]
    monkeypatch.setattr(LoadProgress, "add", lambda _, n: read.__setitem__(0, read[0] + n))
    for shard in (Shard(), Shard(0, 2)):
        read[0] = 0
        model = TargetModel.load(folder, ops=load_ops("cpu"), shard=shard)
        assert read[0] == bytes_to_read(Checkpoint.open(folder), model.config, shard)


def test_an_error_in_one_thread_ends_the_load(tmp_path: Path) -> None:
    folder = random_kimi.write(tmp_path / "k", "--shards", "2")
    checkpoint = Checkpoint.open(folder)
    stored = checkpoint.find("model.layers.1.mlp.experts.2.up_proj.weight_scale")
    with stored.path.open("r+b") as file:
        file.seek(stored.start)
        file.write(b"\xff" * 8)
    with pytest.raises(checkpoint_module.CheckpointError, match=r"1\.mlp\.experts\.2\.up_proj"):
        TargetModel.load(folder, ops=load_ops("cpu"), threads=3)


def test_progress_on_a_terminal() -> None:
    screen, now = io.StringIO(), [0.0]
    with LoadProgress(4_000_000_000, "weights", screen=screen, clock=lambda: now[0]) as progress:
        now[0] = 0.1
        progress.add(100)  # too soon to draw
        assert not screen.getvalue()
        now[0] = 2.0
        progress.add(999_999_900)
        line = screen.getvalue()
        assert "weights [#######" in line and "1.0 of 4.0 GB, 0.50 GB/s, 0:06 left" in line
    assert screen.getvalue().endswith("\n")


def test_progress_in_a_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kdray"), "propagate", True)
    now = [0.0]
    progress = LoadProgress(100_000_000_000, "weights of rank 3", clock=lambda: now[0])
    progress._screen = None  # whatever runs the tests
    with caplog.at_level("INFO", logger="kdray"), progress:
        for now[0] in (4.0, 8.0, 11.0, 12.0):
            progress.add(10_000_000_000)
    assert [record.message for record in caplog.records] == [
        "weights of rank 3 [#########                     ] 30.0 of 100.0 GB, 2.73 GB/s, 0:26 left",
        "weights of rank 3: 40.00 GB in 12.0 s, 3.33 GB/s",
    ]


def test_nothing_to_load_is_loaded() -> None:
    progress = LoadProgress(0, "nothing", clock=lambda: 1.0)
    assert "0.0 of 0.0 GB" in progress.line(1.0)
