"""Weights on a GPU are those of the file, or drawn there, and take what was planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jobs import make_checkpoint
from kdray.config import EngineConfig, LoadFormat
from kdray.facts import resolve
from kdray.kernels.ops import load_ops
from kdray.kernels.reference_moe import weights_of
from kdray.memory_plan import plan_of_start
from kdray.model import checkpoint as checkpoint_module
from kdray.model import placed
from kdray.model.checkpoint import Checkpoint, Part
from kdray.model.moe import PackedMoE
from kdray.model.parallel import Shard
from kdray.model.placed import PlacedCheckpoint
from kdray.model.target import TargetModel
from tests.model import random_kimi

pytestmark = pytest.mark.gpu
WIDER = (
    "hidden_size=512,moe_intermediate_size=256,intermediate_size=1024,n_routed_experts=64,"
    "vocab_size=8192,num_attention_heads=8,q_lora_rank=256,kv_lora_rank=128,qk_nope_head_dim=64,"
    "qk_rope_head_dim=16,v_head_dim=64,num_hidden_layers=6"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wider")
    assert make_checkpoint.main(["--out", str(path), "--set", WIDER, "--shards", "5"]) == 0
    return path


@pytest.mark.parametrize("block", [1000, 1 << 24])
def test_parts_through_pinned_buffers(
    device: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Many small blocks, so that buffers are used again while copies are on their way."""
    monkeypatch.setattr(checkpoint_module, "BLOCK_BYTES", block)
    monkeypatch.setattr(placed, "BLOCK_BYTES", block)
    checkpoint = Checkpoint.open(folder)
    parts = [Part("lm_head.weight", slice(4096, 8192)), Part("model.norm.weight")]
    for expert in range(64):
        root = f"model.layers.3.mlp.experts.{expert}"
        parts += [
            Part(f"{root}.up_proj.weight_packed", slice(64, 128)),
            Part(f"{root}.down_proj.weight_packed", None, slice(8, 16)),
            Part(f"{root}.down_proj.weight_scale", None, slice(2, 4)),
        ]
    source = PlacedCheckpoint(checkpoint, device, threads=6)
    for got, wanted in zip(source.several(parts), checkpoint.several(parts), strict=True):
        assert got.device == device and torch.equal(got.cpu(), wanted)
    source.close()


def test_packed_experts_are_the_checkpoints(device: torch.device, folder: Path) -> None:
    loaded = [
        TargetModel.load(
            folder,
            ops=load_ops(where),
            shard=Shard(1, 2),
            dtype=torch.bfloat16,
            device=where,
        )
        for where in (device, torch.device("cpu"))
    ]
    on_gpu, on_cpu = (model.layers[4].mlp for model in loaded)
    assert isinstance(on_gpu, PackedMoE)
    for expert in (0, 31, 63):
        gate, up, down = (w.bfloat16().cpu() for w in weights_of(on_gpu.experts, expert))
        assert torch.equal(torch.cat([gate, up]).T, on_cpu.gate_up[expert])  # type: ignore[union-attr]
        assert torch.equal(down.T, on_cpu.down[expert])  # type: ignore[union-attr]


def test_ranks_draw_parts_of_one_model(device: torch.device, folder: Path) -> None:
    whole, *halves = (
        TargetModel.load(
            folder,
            ops=load_ops(device),
            shard=shard,
            dtype=torch.bfloat16,
            device=device,
            load_format="dummy",
        )
        for shard in (Shard(), Shard(0, 2), Shard(1, 2))
    )
    assert torch.equal(torch.cat([half.head for half in halves]), whole.head)
    own, *parts = (model.layers[4].mlp.experts for model in (whole, *halves))  # type: ignore[union-attr]
    for expert in (0, 63):
        gate, up, down = weights_of(own, expert)
        split = [weights_of(part, expert) for part in parts]
        assert torch.equal(torch.cat([part[0] for part in split]), gate)
        assert torch.equal(torch.cat([part[1] for part in split]), up)
        assert torch.equal(torch.cat([part[2] for part in split], dim=1), down)
        assert gate.std() > 0 and not torch.equal(gate, up)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_take_what_was_planned(
    device: torch.device, folder: Path, ranks: int, load_format: LoadFormat
) -> None:
    config = EngineConfig(model=str(folder), tp=ranks, max_requests=1, max_model_len=64)
    facts = resolve(config)
    planned = plan_of_start(config, facts, 0).weights
    ops = load_ops(device)
    before = torch.cuda.memory_allocated(device)
    model = TargetModel.load(
        folder,
        ops=ops,
        shard=Shard(0, ranks),
        dtype=facts.dtype,
        device=device,
        load_format=load_format,
    )
    taken = torch.cuda.memory_allocated(device) - before
    assert len(model.layers) == 6
    # Blocks of 512 bytes, and rope's table.
    assert planned <= taken <= planned * 1.03 + (4 << 20)


def test_a_small_one_loads_too(device: torch.device, tmp_path: Path) -> None:
    folder = random_kimi.write(tmp_path / "k", "--shards", "2")
    model = TargetModel.load(folder, ops=load_ops(device), dtype=torch.bfloat16, device=device)
    assert model.embedding.is_cuda and model.num_layers == 3
