from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kdray.errors import CheckpointError
from kdray.model.checkpoint import Checkpoint


def save(folder: Path, file: str = "model.safetensors", **tensors: Tensor) -> Path:
    named = {name.replace("__", "."): value.clone() for name, value in tensors.items()}
    save_file(named, folder / file)
    return folder


def write_raw(folder: Path, header: bytes | dict[str, Any], data: bytes = b"") -> Path:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(body)) + body + data)
    return folder


def index(folder: Path, **files: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_slices_equal_the_tensors_own(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = (torch.randn(6, 10) * 50).to(dtype)
    checkpoint = Checkpoint.open(save(tmp_path, odd=torch.ones(3, dtype=torch.int8), w=weight))
    torch.testing.assert_close(checkpoint.tensor("w"), weight, rtol=0, atol=0)
    rows, cols = slice(2, 5), slice(4, 8)
    torch.testing.assert_close(checkpoint.tensor("w", rows), weight[2:5], rtol=0, atol=0)
    torch.testing.assert_close(checkpoint.tensor("w", None, cols), weight[:, 4:8], rtol=0, atol=0)
    part = checkpoint.tensor("w", rows, cols)
    torch.testing.assert_close(part, weight[2:5, 4:8], rtol=0, atol=0)
    part.zero_()  # a copy: the file's map is untouched
    torch.testing.assert_close(checkpoint.tensor("w"), weight, rtol=0, atol=0)


def test_vectors_scalars_and_empty_tensors_can_be_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(
        save(tmp_path, v=torch.arange(3.0), s=torch.tensor(2.5), e=torch.ones(0, 4))
    )
    assert checkpoint.tensor("v").tolist() == [0.0, 1.0, 2.0]
    assert checkpoint.tensor("s").item() == 2.5
    assert checkpoint.tensor("e").shape == (0, 4)


def test_prefix_is_stripped_and_vision_left_out(tmp_path: Path) -> None:
    one = torch.ones(1)
    checkpoint = Checkpoint.open(
        save(
            tmp_path,
            language_model__model__norm__weight=one,
            language_model__lm_head__weight=one,
            vision_tower__x=one,
            mm_projector__y=one,
        )
    )
    assert set(checkpoint.names) == {"model.norm.weight", "lm_head.weight"}
    assert "model.norm.weight" in checkpoint
    assert "vision_tower.x" not in checkpoint


def test_shards_through_an_index_and_without_one(tmp_path: Path) -> None:
    save(tmp_path, "a.safetensors", x=torch.ones(2))
    save(tmp_path, "b.safetensors", y=torch.zeros(2))
    assert set(Checkpoint.open(tmp_path).names) == {"x", "y"}
    save(tmp_path, "c.safetensors", y=torch.ones(2))
    index(tmp_path, x="a.safetensors", y="c.safetensors")
    assert Checkpoint.open(tmp_path).tensor("y").tolist() == [1.0, 1.0]


def test_model_safetensors_alone_is_read_where_it_exists(tmp_path: Path) -> None:
    save(tmp_path, x=torch.ones(2))
    save(tmp_path, "consolidated.safetensors", x=torch.zeros(2))
    assert Checkpoint.open(tmp_path).tensor("x").tolist() == [1.0, 1.0]


def test_missing_shard_and_misplaced_tensor_are_named(tmp_path: Path) -> None:
    save(tmp_path, "a.safetensors", x=torch.ones(2))
    index(tmp_path, x="a.safetensors", y="b.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing, though .*index"):
        Checkpoint.open(tmp_path)
    index(tmp_path, x="a.safetensors", y="a.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor y is not in .*a\.safetensors"):
        Checkpoint.open(tmp_path)


def test_an_index_cannot_point_out_of_the_folder(tmp_path: Path) -> None:
    index(tmp_path, x="../other/model.safetensors")
    with pytest.raises(CheckpointError, match="not a file of this folder"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_broken_index_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="no readable weight_map"):
        Checkpoint.open(tmp_path)


def test_duplicate_tensor_over_two_shards(tmp_path: Path) -> None:
    save(tmp_path, "a.safetensors", x=torch.ones(2))
    save(tmp_path, "b.safetensors", language_model__x=torch.ones(2))
    with pytest.raises(CheckpointError, match=r"tensor x is stored twice, in .*a.* and .*b"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = save(tmp_path, x=torch.ones(64)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        Checkpoint.open(tmp_path)


def test_header_too_large(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(CheckpointError, match="declares a header of 1099511627776 bytes"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "broken header"),
        (b"[]", "no JSON object"),
        (b'{"x": {}, "x": {}}', "x is listed twice"),
        ({"x": {"dtype": "F32", "shape": [2]}}, "broken header entry of x"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "cannot lie in bytes"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "cannot lie in bytes"),
    ],
)
def test_broken_headers(tmp_path: Path, header: bytes | dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(write_raw(tmp_path, header, b"\0" * 8))


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "absent")


def test_require_names_tensor_shapes_and_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, w=torch.ones(2, 3), i=torch.ones(2).int()))
    assert checkpoint.require("w", (2, 3)).dtype == "F32"
    with pytest.raises(
        CheckpointError, match=r"w has shape \[2, 3\] where \[3, 2\] is wanted .*model\.safetensors"
    ):
        checkpoint.require("w", (3, 2))
    with pytest.raises(CheckpointError, match="i has dtype I32 where BF16 or F16 or F32"):
        checkpoint.require("i", (2,))
    with pytest.raises(CheckpointError, match="tensor z is missing in"):
        checkpoint.require("z", (2,))


def test_fp8_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, w=torch.ones(4).to(torch.float8_e4m3fn)))
    with pytest.raises(CheckpointError, match="w has dtype F8_E4M3, which kdray does not read"):
        checkpoint.tensor("w")
