"""Tensor-parallel ranks as threads equal one rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kdray.errors import ConfigError
from kdray.kernels.ops import load_ops
from kdray.model.parallel import Shard
from kdray.model.target import TargetModel
from tests.model.paged import PagedRunner, Part
from tests.model.tiny import save_int4, save_plain
from tests.thread_ranks import Meeting, ThreadCollectives

PROMPT = torch.randint(3, 96, (260,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shards")
    kinds = {kind: save_plain(root / kind, kind) for kind in ("deepseek", "plain_query", "wide_tp")}
    save_int4(root / "int4", kinds["wide_tp"])
    return kinds | {"int4": root / "int4"}


def run(model: TargetModel) -> tuple[Tensor, Tensor]:
    """Logits and features of a long chunk, then of a tree."""
    runner = PagedRunner(model)
    text = runner.text(280)
    first = runner.run(Part(text, PROMPT))
    second = runner.run(Part(text, [7], [8, 9, 10], [0, 0, 2]))
    with torch.inference_mode():
        logits = model.logits(torch.cat([first.hidden, second.hidden]))
    return logits, torch.cat([first.features, second.features])


@pytest.mark.parametrize("kind", ["deepseek", "plain_query", "int4"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_equal_one(folders: dict[str, Path], kind: str, size: int) -> None:
    logits, features = run(TargetModel.load(folders[kind], ops=load_ops("cpu"), taps=(0, 2)))
    meeting = Meeting(size)

    def rank(r: int) -> tuple[Tensor, Tensor]:
        model = TargetModel.load(
            folders[kind],
            ops=load_ops("cpu"),
            shard=Shard(r, size),
            collectives=ThreadCollectives(meeting, r),
            taps=(0, 2),
        )
        assert model.head.shape[0] == model.config.vocab_size // size
        return run(model)

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(rank, range(size)))
    for found, found_features in results:
        assert torch.equal(found, results[0][0])  # every rank has the same bits
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found_features, features, rtol=1e-4, atol=1e-4)


def test_a_size_that_does_not_divide_the_model_names_the_numbers(folders: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"tp 5 must divide num_attention_heads 4, vocab_size 96, intermediate"
    ):
        TargetModel.load(folders["deepseek"], ops=load_ops("cpu"), shard=Shard(0, 5))


def test_int4_groups_limit_the_size(folders: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"tp 8 leaves 16 of the 128 inputs of .*experts\.0\.down_proj to a rank"
    ):
        TargetModel.load(folders["int4"], ops=load_ops("cpu"), shard=Shard(0, 8))
    plain = TargetModel.load(folders["wide_tp"], ops=load_ops("cpu"), shard=Shard(0, 8))
    assert plain.head.shape == (12, 64)


def test_a_rank_outside_the_group(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="rank 2 is not one of 2 ranks"):
        TargetModel.load(folders["deepseek"], ops=load_ops("cpu"), shard=Shard(2, 2))
