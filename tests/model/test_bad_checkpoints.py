"""A damaged folder is refused on one line, which names the file and, if there is one, the tensor.

Each case spoils a sound checkpoint of Kimi's layout, INT4 experts in three files with an index.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kdray.errors import CheckpointError, ConfigError, KdrayError, UnsupportedModel
from kdray.kernels.ops import load_ops
from kdray.model.checkpoint import INDEX, Checkpoint
from kdray.model.drafter import DFlashDrafter
from kdray.model.parallel import Shard
from kdray.model.placed import PlacedCheckpoint
from kdray.model.target import TargetModel
from kdray.model.tokenizer import Tokenizer
from tests.model import random_kimi

Spoil = Callable[[Path], object]
LAYER = "language_model.model.layers.1"
EXPERT = f"{LAYER}.mlp.experts.3.up_proj"
PACKED, SCALE, SHAPE = (f"{EXPERT}.weight_{part}" for part in ("packed", "scale", "shape"))
KV_B = f"{LAYER}.self_attn.kv_b_proj.weight"
NORM = f"{LAYER}.input_layernorm.weight"
BIAS = f"{LAYER}.mlp.gate.e_score_correction_bias"
HEAD = "language_model.lm_head.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    target, drafter = folder / "target", folder / "drafter"
    random_kimi.write(target, "--drafter", str(drafter), "--shards", "3")
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """The target's folder, the drafter's beside it, to be spoilt."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    return tmp_path / "target"


def load(folder: Path, ranks: int = 1) -> TargetModel:
    return TargetModel.load(folder, ops=load_ops("cpu"), shard=Shard(0, ranks))


def file_of(folder: Path, name: str) -> Path:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / weight_map[name]


def put(name: str, value: Callable[[Tensor], Tensor | None]) -> Spoil:
    """Replace one tensor; None drops it, from the index too."""

    def spoil(folder: Path) -> None:
        path = file_of(folder, name)
        tensors = load_file(path)
        new = value(tensors.pop(name))
        if new is not None:
            tensors[name] = new
        save_file(tensors, path)
        if new is None:
            unlist(folder, {name})

    return spoil


def unlist(folder: Path, names: set[str]) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if k not in names}
    (folder / INDEX).write_text(json.dumps(index))


def add(name: str, value: Tensor) -> Spoil:
    """A further tensor in the file of lm_head, listed."""

    def spoil(folder: Path) -> None:
        path = file_of(folder, HEAD)
        save_file(load_file(path) | {name: value}, path)
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][name] = path.name
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def drop_layer(folder: Path) -> None:
    """Layer 1 as a whole."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        kept = {name: t for name, t in tensors.items() if not name.startswith(f"{LAYER}.")}
        save_file(kept, path)
        unlist(folder, tensors.keys() - kept.keys())


def cut_to(size: Callable[[int], int]) -> Spoil:
    def spoil(folder: Path) -> None:
        path = file_of(folder, PACKED)
        path.write_bytes(path.read_bytes()[: size(path.stat().st_size)])

    return spoil


def swap_files(folder: Path) -> None:
    first, second = sorted({file_of(folder, PACKED), file_of(folder, HEAD)})
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])


def header(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Rewrite the header of the file of PACKED, its data left as they are."""

    def spoil(folder: Path) -> None:
        path = file_of(folder, PACKED)
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        body = change(json.loads(raw[8 : 8 + length]))
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return spoil


def move_start(entries: dict[str, Any]) -> dict[str, Any]:
    """The scales into the middle of the packed words, their size kept."""
    (start, _), (first, last) = (entries[name]["data_offsets"] for name in (PACKED, SCALE))
    entries[SCALE]["data_offsets"] = [start + 4, start + 4 + last - first]
    return entries


def longer(entries: dict[str, Any]) -> dict[str, Any]:
    entries[PACKED]["shape"][0] += 1
    return entries


def list_twice(entries: dict[str, Any]) -> bytes:
    return f'{{"{NORM}": {{}}, "{NORM}": {{}}}}'.encode()


def index(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / INDEX).read_text())
        changed = change(values)
        text = changed if isinstance(changed, str) else json.dumps(values)
        (folder / INDEX).write_text(text)

    return spoil


def config(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Spoil:
    """change(top, text_config)"""

    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        fields = json.loads(path.read_text())
        change(fields, fields["text_config"])
        path.write_text(json.dumps(fields))

    return spoil


def bits(_: object, text: dict[str, Any]) -> None:
    group = text["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["num_bits"] = 8


def group_size(_: object, text: dict[str, Any]) -> None:
    group = text["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["group_size"] = 128


def overwrite(name: str, data: bytes) -> Spoil:
    return lambda folder: file_of(folder, name).write_bytes(data)


FILE = r"model-0000\d-of-000003\.safetensors"
BARE = PACKED.removeprefix("language_model.")
CASES: dict[str, tuple[Spoil, type[KdrayError], str, str]] = {
    # what is wrong: spoil, error, the file that is named, what else is said
    "cut in the data": (
        cut_to(lambda n: n - 100), CheckpointError, FILE, r"is truncated: .* but \S+ ends at byte"),
    "cut in the header": (
        cut_to(lambda _: 400), CheckpointError, FILE, "is truncated: 400 bytes, its header needs"),
    "empty file": (
        cut_to(lambda _: 0), CheckpointError, FILE, "is truncated: 0 bytes hold no header"),
    "two files swapped": (
        swap_files, CheckpointError, FILE, r"tensor language_model\S+ is not in"),
    "scale missing": (
        put(SCALE, lambda _: None), CheckpointError, FILE, r"experts\.3\.up_proj\.weight_scale is"),
    "norm missing": (
        put(NORM, lambda _: None), CheckpointError, FILE, r"1\.input_layernorm\.weight is missing"),
    "tensor listed, not stored": (
        lambda f: save_file({}, file_of(f, PACKED)), CheckpointError, FILE, "is not in"),
    "layer missing": (
        drop_layer, CheckpointError, FILE, r"layers\.1\.input_layernorm\.weight is missing"),
    "layer too many": (
        add("language_model.model.layers.3.input_layernorm.weight", torch.ones(64)),
        UnsupportedModel, FILE, r"layers\.3\.input_layernorm\.weight is not part of the archit"),
    "another prefix": (
        add("audio_tower.x", torch.ones(1)), CheckpointError, FILE, r"audio_tower\.x has an unk"),
    "group of 64": (
        put(SCALE, lambda t: t[:, ::2].contiguous()), CheckpointError, FILE,
        r"up_proj\.weight_scale has shape \[64, 1\] where \[64, 2\] is wanted"),
    "group of 128 in the config": (
        config(group_size), UnsupportedModel, r"config\.json", "group_size = 128"),
    "words as floats": (
        put(PACKED, lambda t: t.float()), CheckpointError, FILE,
        r"up_proj\.weight_packed has dtype F32 where I32 is wanted"),
    "scale as integers": (
        put(SCALE, lambda t: t.int()), CheckpointError, FILE,
        r"up_proj\.weight_scale has dtype I32 where BF16"),
    "weight in fp8": (
        put(KV_B, lambda t: t.to(torch.float8_e4m3fn)), CheckpointError, FILE,
        r"kv_b_proj\.weight has dtype F8_E4M3"),
    "rows missing": (
        put(KV_B, lambda t: t[:-1].contiguous()), CheckpointError, FILE,
        r"kv_b_proj\.weight has shape \[111, 32\] where \[112, 32\] is wanted"),
    "transposed": (
        put(PACKED, lambda t: t.T.contiguous()), CheckpointError, FILE,
        r"up_proj\.weight_packed has shape \[8, 64\] where \[64, 8\] is wanted"),
    "another shape told": (
        put(SHAPE, lambda t: t * 2), CheckpointError, FILE,
        r"up_proj\.weight_shape says \[128, 128\] where \[64, 64\] is wanted"),
    "scale of NaN": (
        put(SCALE, lambda t: t * torch.nan), CheckpointError, FILE,
        r"up_proj\.weight_scale holds numbers that are not finite"),
    "one infinity": (
        put(KV_B, lambda t: t.index_fill(0, torch.tensor(17), torch.inf)), CheckpointError, FILE,
        r"kv_b_proj\.weight holds numbers that are not finite"),
    "router's bias of NaN": (
        put(BIAS, lambda t: t * torch.nan), CheckpointError, FILE,
        r"e_score_correction_bias holds numbers that are not finite"),
    "stored twice": (
        add(KV_B, torch.ones(112, 32)), CheckpointError, FILE,
        rf"kv_b_proj\.weight is stored twice, in \S+{FILE} and"),
    "listed twice in a header": (
        header(list_twice), CheckpointError, FILE, r"input_layernorm\.weight is listed twice"),
    "header too long": (
        overwrite(PACKED, struct.pack("<Q", 1 << 40)), CheckpointError, FILE,
        "declares a header of 1099511627776 bytes"),
    "a pointer in place of the file": (
        overwrite(PACKED, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        CheckpointError, FILE, "it is not a safetensors file"),
    "header of no JSON": (
        header(lambda _: b"\xff{"), CheckpointError, FILE, "has a broken header"),
    "overlapping tensors": (
        header(move_start), CheckpointError, FILE,
        rf"{re.escape(SCALE)} begins at byte \d+, inside {re.escape(PACKED)}"),
    "offsets of another size": (
        header(longer), CheckpointError, FILE, rf"{re.escape(PACKED)} of \[65, 8\] I32 cannot lie"),
    "index names a missing file": (
        index(lambda v: v["weight_map"].update({NORM: "model-00009-of-000003.safetensors"})),
        CheckpointError, r"model-00009-of-000003\.safetensors", rf"for tensor {re.escape(NORM)}"),
    "index names another file": (
        index(lambda v: v["weight_map"].update({NORM: v["weight_map"][HEAD]})),
        CheckpointError, FILE, rf"tensor {re.escape(NORM)} is not in"),
    "index of no JSON": (
        index(lambda _: "{"), CheckpointError, re.escape(INDEX), "has no readable weight_map"),
    "index points elsewhere": (
        index(lambda v: v["weight_map"].update({NORM: "../x.safetensors"})), CheckpointError,
        re.escape(INDEX), r"'\.\./x\.safetensors', which is not a file of this folder"),
    "config lacks a field": (
        config(lambda _, text: text.pop("kv_lora_rank")), CheckpointError, r"config\.json",
        "field kv_lora_rank is missing"),
    "config of no JSON": (
        lambda f: (f / "config.json").write_text("{"), CheckpointError, r"config\.json",
        "cannot be read as JSON"),
    "another architecture": (
        config(lambda top, _: top.update(model_type="qwen3_moe")), UnsupportedModel,
        r"config\.json", "model_type 'qwen3_moe' is not supported"),
    "eight bits": (
        config(bits), UnsupportedModel, r"config\.json", "num_bits = 8"),
    "fewer experts in the config": (
        config(lambda _, text: text.update(n_routed_experts=6)), CheckpointError, FILE,
        r"mlp\.gate\.weight has shape \[8, 64\] where \[6, 64\] is wanted"),
    "wider model in the config": (
        config(lambda _, text: text.update(hidden_size=128)), CheckpointError, FILE,
        r"model\.embed_tokens\.weight has shape \[96, 64\] where \[96, 128\] is wanted"),
    "plain experts in the config": (
        config(lambda _, text: text.pop("quantization_config")), CheckpointError, FILE,
        r"experts\.0\.gate_proj\.weight is missing"),
    "end token outside": (
        config(lambda top, _: top.update(eos_token_id=96)), CheckpointError, r"config\.json",
        r"eos_token_id \[95, 96\] is outside the vocabulary of 96"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_it_is_refused_on_a_line_that_names_the_file(folder: Path, kind: str) -> None:
    spoil, error, file, what = CASES[kind]
    spoil(folder)
    with pytest.raises(error) as caught:
        load(folder)
    said = str(caught.value)
    assert "\n" not in said
    assert re.search(file, said), said
    assert re.search(what, said), said


def test_a_sound_one_loads_for_every_rank(folder: Path) -> None:
    assert load(folder).num_layers == load(folder, ranks=2).num_layers == 3


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (3, "tp 3 must divide num_attention_heads 4, moe_intermediate_size 64; choose another tp"),
        (4, rf"tp 4 leaves 16 of the 64 inputs of \S+down_proj to a rank.*{FILE}"),
    ],
)
def test_ranks_that_cannot_split_it(folder: Path, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, ranks)


def test_a_file_that_shrinks_while_it_is_read(folder: Path) -> None:
    checkpoint = PlacedCheckpoint(Checkpoint.open(folder), torch.device("cpu"))
    path = file_of(folder, PACKED)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=rf"{FILE} ends at byte \d+, though it was longer"):
        checkpoint.tensor(BARE)


def test_no_tokenizer(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"target holds neither tiktoken\.model nor tok"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vocab_size", 128, "has vocab_size 128, the target's is 96: it was made for another"),
        ("hidden_size", 32, "has hidden_size 32, the target's is 64"),
        ("num_target_layers", 61, "has num_target_layers 61, the target's is 3"),
    ],
)
def test_a_drafter_of_another_target(folder: Path, name: str, value: int, message: str) -> None:
    drafter = folder.parent / "drafter"
    fields = json.loads((drafter / "config.json").read_text()) | {name: value}
    (drafter / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=rf"the drafter in \S+drafter {message}"):
        load_drafter(drafter, folder)


def test_a_drafter_that_lacks_a_tensor(folder: Path) -> None:
    path = folder.parent / "drafter" / "model.safetensors"
    tensors = load_file(path)
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight is missing in \S+"):
        load_drafter(path.parent, folder)


def load_drafter(drafter: Path, target: Path) -> DFlashDrafter:
    return DFlashDrafter.load(
        drafter, load(target), ops=load_ops("cpu"), candidates=4, page_size=4, num_pages=2
    )
