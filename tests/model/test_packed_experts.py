"""What a rank keeps of INT4 experts is what the checkpoint says, through the kernel's layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdray.kernels.reference_moe import weights_of
from kdray.model import packed_experts
from kdray.model.checkpoint import Checkpoint
from kdray.model.config import ModelConfig
from kdray.model.int4 import read_packed, unpack
from kdray.model.packed_experts import are_packed, read_experts
from kdray.model.parallel import Shard
from tests.model import random_kimi
from tests.model.tiny import save_plain

ROOT = "model.layers.1.mlp"


@pytest.mark.parametrize("at_a_time", [3, 16])
@pytest.mark.parametrize("shard", [Shard(), Shard(0, 2), Shard(1, 2)], ids=str)
def test_round_trip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: Shard, at_a_time: int
) -> None:
    monkeypatch.setattr(packed_experts, "AT_A_TIME", at_a_time)
    folder = random_kimi.write(tmp_path / "k", "--shards", "2")
    checkpoint, config = Checkpoint.open(folder), ModelConfig.from_folder(folder)
    assert are_packed(checkpoint, config, ROOT)
    kept = read_experts(checkpoint, config, shard, ROOT, torch.device("cpu"))
    part = shard.slice_of(64)
    for expert in range(8):
        names = [f"{ROOT}.experts.{expert}.{name}_proj" for name in ("gate", "up", "down")]
        found = weights_of(kept, expert)
        for name, values in zip(names, found, strict=True):
            packed, scale = read_packed(checkpoint, name)
            exact = unpack(packed).float() * scale.float().repeat_interleave(32, dim=1)
            mine = exact[:, part] if "down" in name else exact[part]
            assert torch.equal(values, mine)


def test_plain_experts_are_not_packed(tmp_path: Path) -> None:
    folder = save_plain(tmp_path / "plain")
    checkpoint, config = Checkpoint.open(folder), ModelConfig.from_folder(folder)
    assert not are_packed(checkpoint, config, ROOT)
