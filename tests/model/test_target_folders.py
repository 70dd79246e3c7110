"""What is wrong with a model folder is said before any weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdray.errors import CheckpointError, UnsupportedModel
from kdray.kernels.ops import load_ops
from kdray.model.stored import ShardFile
from kdray.model.target import TargetModel
from tests.model.paged import PagedRunner, Part
from tests.model.tiny import INT4_SCHEME, edit_config, edit_tensors, save_int4, save_plain

NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.2.mlp.experts.5.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_plain(tmp_path / "model")


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a weight fails the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read before the check")

    monkeypatch.setattr(ShardFile, "read_into", refuse)


def load(folder: Path) -> TargetModel:
    return TargetModel.load(folder, ops=load_ops("cpu"))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    "name",
    [
        NORM,
        DOWN,
        "lm_head.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.shared_experts.up_proj.weight",
    ],
)
def test_missing_tensor(folder: Path, name: str) -> None:
    edit_tensors(folder, drop=name)
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing in .*model"):
        load(folder)


@pytest.mark.usefixtures("unread")
def test_wrong_shape_and_dtype(folder: Path) -> None:
    edit_tensors(folder, {DOWN: torch.ones(64, 31)})
    with pytest.raises(
        CheckpointError, match=rf"{DOWN} has shape \[64, 31\] where \[64, 32\] is wanted"
    ):
        load(folder)
    edit_tensors(folder, {DOWN: torch.ones(64, 32).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=f"{DOWN} has dtype F8_E4M3 where BF16"):
        load(folder)


@pytest.mark.usefixtures("unread")
def test_unknown_tensors(folder: Path) -> None:
    edit_tensors(folder, {"audio_tower.x": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"audio_tower\.x has an unknown prefix"):
        load(folder)
    edit_tensors(
        folder, {"model.layers.0.self_attn.q_a_proj.bias": torch.ones(24)}, drop="audio_tower.x"
    )
    with pytest.raises(UnsupportedModel, match=r"q_a_proj\.bias is not part of the architecture"):
        load(folder)


def test_prediction_layers_and_rope_tables_are_skipped(folder: Path) -> None:
    edit_config(folder, num_nextn_predict_layers=1)
    before = load(folder)
    edit_tensors(
        folder,
        {
            "model.layers.3.eh_proj.weight": torch.ones(64, 128),
            "model.layers.3.self_attn.q_a_proj.weight": torch.ones(24, 64),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        },
    )
    after = load(folder)
    assert after.num_layers == before.num_layers == 3
    results = []
    for model in (before, after):
        runner = PagedRunner(model)
        results.append(runner.logits(Part(runner.text(16), [4, 5, 6])))
    assert torch.equal(results[0], results[1])


def test_the_quantised_and_the_plain_form_must_match_the_config(
    folder: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "int4"
    save_int4(packed, folder)
    edit_config(packed, quantization_config=...)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight is missing"):
        load(packed)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("packed", torch.ones(32, 7, dtype=torch.int32), r"has shape \[32, 7\] where \[32, 8\]"),
        ("packed", torch.ones(32, 8), "has dtype F32 where I32 is wanted"),
        ("scale", torch.ones(32, 1), r"has shape \[32, 1\] where \[32, 2\]"),
        ("shape", torch.tensor([32, 128]), r"says \[32, 128\] where \[32, 64\]"),
    ],
)
def test_packed_parts_are_checked(
    folder: Path, tmp_path: Path, part: str, value: torch.Tensor, message: str
) -> None:
    save_int4(tmp_path / "int4", folder)
    name = f"model.layers.1.mlp.experts.3.up_proj.weight_{part}"
    edit_tensors(tmp_path / "int4", {name: value})
    with pytest.raises(CheckpointError, match=f"{name} {message}"):
        load(tmp_path / "int4")


def test_inputs_that_do_not_fill_a_group(folder: Path) -> None:
    edit_config(folder, quantization_config=INT4_SCHEME)
    name = "model.layers.0.self_attn.o_proj"
    edit_tensors(folder, {f"{name}.weight_packed": torch.ones(64, 6, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=f"{name} has 48 inputs; packed INT4 needs a multip"):
        load(folder)
