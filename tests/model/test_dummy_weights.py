"""Weights that are drawn: of even size, the same whoever draws which part, and loaded as files."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kdray.config import EngineConfig
from kdray.errors import CheckpointError, ConfigError
from kdray.facts import resolve
from kdray.kernels.moe_layout import unpack
from kdray.kernels.ops import load_ops
from kdray.model import dummy_weights
from kdray.model.checkpoint import Part as TensorPart
from kdray.model.config import ModelConfig
from kdray.model.drafter import DFlashDrafter
from kdray.model.dummy_weights import DrawnCheckpoint, Pool, described, target_tensors
from kdray.model.int4 import read_linear
from kdray.model.manifest import bytes_to_read, check_checkpoint, needed_tensors
from kdray.model.packed_experts import are_packed, read_experts
from kdray.model.parallel import Shard
from kdray.model.progress import LoadProgress
from kdray.model.target import TargetModel
from tests.model import dummy_folders
from tests.model.paged import PagedRunner, Part
from tests.model.tiny import save_plain
from tests.thread_ranks import Meeting, ThreadCollectives

CPU = torch.device("cpu")
ROOT = "model.layers.1.mlp"
PROMPT = torch.randint(0, 1024, (40,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return dummy_folders.write(tmp_path_factory.mktemp("dummy"))


@pytest.fixture(scope="module")
def folder(folders: tuple[Path, Path]) -> Path:
    return folders[0]


@pytest.fixture
def few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly every tensor is larger than the pool it is a run of."""
    monkeypatch.setattr(dummy_weights, "POOL_NUMBERS", {"cpu": 1009})


def drawn(folder: Path) -> DrawnCheckpoint:
    tensors = target_tensors(ModelConfig.from_folder(folder))
    return DrawnCheckpoint(described(folder, tensors), CPU)


def load(folder: Path, rank: int = 0, size: int = 1, threads: int = 1) -> TargetModel:
    shard = Shard(rank, size)
    return TargetModel.load(
        folder, ops=load_ops("cpu"), shard=shard, threads=threads, load_format="dummy"
    )


def test_weights_are_whole_and_of_even_size(folder: Path) -> None:
    checkpoint = drawn(folder)
    for needed in needed_tensors(ModelConfig.from_folder(folder)):
        if needed.is_linear:
            weight = read_linear(checkpoint, needed.name).float()
            assert weight.shape == needed.shape
            assert weight.std() * needed.shape[1] ** 0.5 == pytest.approx(1.0, abs=0.15)
        else:
            assert checkpoint.tensor(needed.name).shape == needed.shape
    own = checkpoint.tensor("lm_head.weight", slice(0, 8))
    kept = own.clone()
    own.zero_()  # no part of a pool
    assert torch.equal(checkpoint.tensor("lm_head.weight", slice(0, 8)), kept)


def test_experts_pack(folder: Path) -> None:
    checkpoint, config = drawn(folder), ModelConfig.from_folder(folder)
    assert are_packed(checkpoint, config, ROOT)
    packed = read_experts(checkpoint, config, Shard(0, 8), ROOT, CPU)
    assert packed.num_experts == 8 and packed.inner == 32
    weights = unpack(packed.down)
    assert set(weights.q.unique().tolist()) == set(range(-7, 8))
    assert weights.scale.isfinite().all() and not torch.equal(packed.down[0], packed.down[1])


def test_a_part_is_the_same_numbers_whoever_draws_it(folder: Path, few_numbers: None) -> None:
    one, other = drawn(folder), drawn(folder)
    for name, stored in one.tensors.items():
        whole = one.tensor(name)
        if name.endswith("norm.weight"):
            assert torch.equal(whole, torch.ones_like(whole))
            continue
        assert whole.float().std() > 0
        rows = slice(3, stored.shape[0] - 2)
        assert torch.equal(other.tensor(name, rows), whole[rows])
        if len(stored.shape) == 2:
            cols = slice(1, stored.shape[1] - 1) if stored.shape[1] > 2 else slice(1, 2)
            assert torch.equal(other.tensor(name, rows, cols), whole[rows, cols])
            [several] = other.several([TensorPart(name, None, cols)])
            assert torch.equal(several, whole[:, cols])


def test_no_row_of_a_matrix_is_another(folder: Path, few_numbers: None) -> None:
    for name in ("lm_head.weight", f"{ROOT}.experts.0.up_proj.weight_packed"):
        rows = drawn(folder).tensor(name)
        assert len(rows.unique(dim=0)) == min(len(rows), 1009)


def test_tensors_differ_by_name(folder: Path) -> None:
    checkpoint = drawn(folder)
    first, second = (checkpoint.tensor(f"model.layers.{n}.mlp.gate.weight") for n in (1, 2))
    assert not torch.equal(first, second)


def test_a_pool_goes_on_at_its_start() -> None:
    pool = Pool(torch.arange(10))
    run = pool.run("any name", 10).tolist()
    assert sorted(run) == list(range(10))
    assert all((after - before) % 10 == 1 for before, after in pairwise(run))


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> tuple[Tensor, list[int]]:
    return text_of(load(folder))


def text_of(model: TargetModel) -> tuple[Tensor, list[int]]:
    """Logits behind a prompt, and the tokens that greedy decoding goes on with."""
    runner = PagedRunner(model)
    text, tokens = runner.text(60), []
    first = logits = runner.logits(Part(text, PROMPT))
    for _ in range(12):
        tokens.append(int(logits[-1].argmax()))
        logits = runner.logits(Part(text, tokens[-1:]))
    return first, tokens


@pytest.mark.parametrize("size", [2, 4, 8])
def test_any_number_of_ranks_is_the_same_model(
    folder: Path, one_rank: tuple[Tensor, list[int]], size: int
) -> None:
    meeting = Meeting(size)

    def rank(r: int) -> tuple[Tensor, list[int]]:
        collectives = ThreadCollectives(meeting, r)
        model = TargetModel.load(
            folder,
            ops=load_ops("cpu"),
            shard=Shard(r, size),
            collectives=collectives,
            load_format="dummy",
        )
        return text_of(model)

    with ThreadPoolExecutor(size) as pool:
        for logits, tokens in pool.map(rank, range(size)):
            torch.testing.assert_close(logits, one_rank[0], rtol=1e-4, atol=1e-4)
            assert tokens == one_rank[1]
    assert len(set(one_rank[1])) > 4


def test_several_threads_load_the_same(folder: Path) -> None:
    one, many = load(folder), load(folder, threads=5)
    for first, second in zip(one.layers, many.layers, strict=True):
        assert torch.equal(first.attention.down, second.attention.down)
        assert torch.equal(first.mlp.down, second.mlp.down)


def test_a_drafter_of_a_split_target_has_the_target_s_tables(folders: tuple[Path, Path]) -> None:
    folder, drafter_folder = folders
    target = load(folder)
    sizes = {"candidates": 4, "page_size": 4, "num_pages": 8}
    shared, read = (
        DFlashDrafter.load(drafter_folder, of, ops=load_ops("cpu"), load_format="dummy", **sizes)  # type: ignore[arg-type]
        for of in (target, folder)
    )
    assert shared.tables.head is target.head
    assert torch.equal(read.tables.embedding, target.embedding)
    assert torch.equal(read.tables.head, target.head)
    for first, second in zip(
        shared.network.weights.layers, read.network.weights.layers, strict=True
    ):
        assert torch.equal(first.qkv, second.qkv)
    first, second = shared.network.weights.layers
    assert first.qkv.std() > 0 and not torch.equal(first.qkv, second.qkv)


def test_what_a_load_draws_is_what_was_announced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, lock = [0], threading.Lock()

    def count(_: LoadProgress, num_bytes: int) -> None:
        with lock:
            read[0] += num_bytes

    monkeypatch.setattr(LoadProgress, "add", count)
    opened = drawn(folder)
    config = ModelConfig.from_folder(folder)
    for shard in (Shard(), Shard(7, 8)):
        read[0] = 0
        with caplog.at_level(logging.INFO):
            load(folder, shard.rank, shard.size)
        assert read[0] == bytes_to_read(opened, config, shard, whole_rows=False)
        assert caplog.messages[-1].startswith(f"dummy weights of rank {shard.rank}: ")
    assert read[0] < bytes_to_read(opened, config, shard)


def test_what_files_would_be_refused_for_is_refused(tmp_path: Path) -> None:
    narrow, _ = dummy_folders.write(tmp_path, moe_intermediate_size=128)
    with pytest.raises(ConfigError, match=r"tp 8 leaves 16 of the 128 inputs .*config\.json"):
        load(narrow, 0, 8)
    with pytest.raises(ConfigError, match="tp 3 must divide"):
        load(narrow, 0, 3)
    with pytest.raises(ConfigError, match="tp 3 must divide"):  # before a rank is started
        resolve(EngineConfig(model=str(narrow), load_format="dummy", tp=3, device="cpu"))


def test_without_dummies_a_folder_of_a_config_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        TargetModel.load(folder, ops=load_ops("cpu"))


def test_files_that_are_there_are_not_read(tmp_path: Path) -> None:
    whole = save_plain(tmp_path / "plain", "wide_tp")
    [file] = whole.glob("*.safetensors")
    file.write_bytes(b"no weights")
    model = load(whole)
    assert model.num_layers == 3 and model.head.std() > 0
    check_checkpoint(drawn(whole), model.config, Shard())
