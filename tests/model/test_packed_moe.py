"""Routed experts that stay INT4 from the file to the product."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdray.kernels.ops import LiveRows, load_ops
from kdray.kernels.reference_moe import weights_of
from kdray.model.checkpoint import Checkpoint
from kdray.model.config import ModelConfig
from kdray.model.int4 import dequantize, read_packed
from kdray.model.moe import MoE, PackedMoE
from kdray.model.parallel import Shard
from kdray.model.weights import WeightReader
from tests.model.tiny import save_int4, save_plain

RANKS = 2
CPU = torch.device("cpu")


def layer_of(folder: Path, shard: Shard) -> MoE | PackedMoE:
    reader = WeightReader(
        checkpoint=Checkpoint.open(folder),
        config=ModelConfig.from_folder(folder),
        shard=shard,
        dtype=torch.float32,
        device=CPU,
    )
    layer = reader.mlp(1, load_ops("cpu"))
    assert isinstance(layer, MoE | PackedMoE)
    return layer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_int4(tmp_path / "int4", save_plain(tmp_path / "plain", "wide_tp"))
    return tmp_path / "int4"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU in bfloat16."""
    monkeypatch.setattr("kdray.model.weights.experts_stay_packed", lambda *_: True)


@pytest.mark.usefixtures("packed")
def test_a_rank_holds_its_slice_of_every_expert(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    for rank in range(RANKS):
        shard = Shard(rank, RANKS)
        layer = layer_of(folder, shard)
        assert isinstance(layer, PackedMoE)
        part = shard.slice_of(layer.experts.inner * RANKS)
        for x in range(layer.experts.num_experts):
            names = (f"model.layers.1.mlp.experts.{x}.{n}_proj" for n in ("gate", "up", "down"))
            gate, up, down = (dequantize(read_packed(checkpoint, name)) for name in names)
            stored = (gate[part], up[part], down[:, part])
            for held, wanted in zip(weights_of(layer.experts, x), stored, strict=True):
                assert torch.equal(held.to(torch.bfloat16), wanted)


def test_it_gives_what_dequantised_experts_give(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    wide = layer_of(folder, Shard())
    assert isinstance(wide, MoE)
    monkeypatch.setattr("kdray.model.weights.experts_stay_packed", lambda *_: True)
    x = torch.randn(20, wide.down.shape[2])
    found, wanted = layer_of(folder, Shard()).partial(x), wide.partial(x)
    assert ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max() < 0.005


@pytest.mark.usefixtures("packed")
def test_padding_visits_the_shared_expert_alone(folder: Path) -> None:
    torch.manual_seed(3)
    layer = layer_of(folder, Shard())
    assert isinstance(layer, PackedMoE)
    x = torch.randn(12, layer.experts.width)
    live = LiveRows(
        slot=torch.tensor([1, -1, 0], dtype=torch.int32),
        num_nodes=torch.tensor([2, 4, 4], dtype=torch.int32),
        nodes=4,
    )
    found, whole, shared = layer.partial(x, live), layer.partial(x), layer.shared.partial(x)
    rows = torch.tensor([0, 1, 8, 9, 10, 11])
    torch.testing.assert_close(found[rows], whole[rows])
    assert torch.equal(found[2:8], shared[2:8])


def test_a_cpu_holds_dequantised_experts(folder: Path) -> None:
    assert isinstance(layer_of(folder, Shard()), MoE)


@pytest.mark.usefixtures("packed")
def test_experts_that_were_left_plain_are_read_as_they_are(tmp_path: Path) -> None:
    assert isinstance(layer_of(save_plain(tmp_path / "plain", "kimi"), Shard()), MoE)
