from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import make_checkpoint
import pytest
import torch
from safetensors import safe_open

from kdray.kernels.ops import load_ops
from kdray.model.checkpoint import Checkpoint
from kdray.model.config import ModelConfig
from kdray.model.drafter import DFlashDrafter
from kdray.model.int4 import read_linear
from kdray.model.manifest import bytes_to_read, check_checkpoint
from kdray.model.parallel import Shard
from kdray.model.target import TargetModel
from tests.model.paged import PagedRunner, Part
from tests.model.random_kimi import write

KIMI = Path(__file__).resolve().parents[2] / "jobs" / "kimi_k26"


def test_it_has_the_published_layout(tmp_path: Path) -> None:
    folder = write(tmp_path / "k", "--shards", "4")
    files = sorted(path.name for path in folder.iterdir())
    assert files == [
        "config.json",
        *(f"model-{i:05}-of-000004.safetensors" for i in (1, 2, 3, 4)),
        "model.safetensors.index.json",
    ]
    published = json.loads((KIMI / "config.json").read_text())
    written = json.loads((folder / "config.json").read_text())
    assert written.keys() == published.keys()
    assert written["text_config"].keys() == published["text_config"].keys()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    expert = "language_model.model.layers.2.mlp.experts.7.down_proj"
    for part, shape in {"packed": [64, 8], "scale": [64, 2], "shape": [2]}.items():
        file = index["weight_map"][f"{expert}.weight_{part}"]
        with safe_open(folder / file, "pt") as opened:
            assert opened.get_slice(f"{expert}.weight_{part}").get_shape() == shape
    with safe_open(folder / file, "pt") as opened:
        assert opened.get_tensor(f"{expert}.weight_shape").tolist() == [64, 64]
    assert index["metadata"]["total_size"] == sum(
        (folder / name).stat().st_size - header_bytes(folder / name) for name in files[1:5]
    )


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_it_loads_whole_and_in_parts_and_runs(tmp_path: Path) -> None:
    folder = write(tmp_path / "k", "--shards", "3", "--drafter", str(tmp_path / "d"))
    config = ModelConfig.from_folder(folder)
    assert config.quantization == "int4"
    checkpoint = Checkpoint.open(folder)
    for shard in (Shard(), Shard(1, 2)):
        check_checkpoint(checkpoint, config, shard)
    # 2 of a scale's bytes for 32 weights, half a byte each: what a rank reads of its rows.
    whole, half = (bytes_to_read(checkpoint, config, Shard(0, ranks)) for ranks in (1, 2))
    assert whole / 2 < half < whole
    model = TargetModel.load(folder, ops=load_ops("cpu"))
    runner = PagedRunner(model)
    logits = runner.logits(Part(runner.text(16), [4, 5, 6]))
    assert logits.isfinite().all() and 0.1 < logits.std().item() < 10
    drafter = DFlashDrafter.load(
        tmp_path / "d", model, ops=load_ops("cpu"), candidates=4, page_size=4, num_pages=8
    )
    assert drafter.depth == 7 and set(drafter.taps) <= {0, 1, 2}


def test_configs_alone(tmp_path: Path) -> None:
    whole = write(tmp_path / "k", "--drafter", str(tmp_path / "d"))
    alone = write(tmp_path / "k2", "--drafter", str(tmp_path / "d2"), "--config-only")
    for folder, same in ((alone, whole), (tmp_path / "d2", tmp_path / "d")):
        assert [path.name for path in folder.iterdir()] == ["config.json"]
        assert (folder / "config.json").read_text() == (same / "config.json").read_text()


@pytest.mark.parametrize("words", [[], ["--config-only"]])
def test_a_config_that_is_refused_does_not_stay(tmp_path: Path, words: list[str]) -> None:
    made = make_checkpoint.main(["--out", str(tmp_path), "--set", "num_hidden_layers=0", *words])
    assert made == 1
    assert not list(tmp_path.iterdir())


def test_numbers_depend_on_names_and_seed_alone(tmp_path: Path) -> None:
    few, many = write(tmp_path / "few", "--shards", "2"), write(tmp_path / "many", "--shards", "9")
    other = write(tmp_path / "other", "--shards", "2", "--seed", "1")
    checkpoints = [Checkpoint.open(folder) for folder in (few, many, other)]
    name = "model.layers.1.mlp.experts.0.up_proj"
    first, second, third = (read_linear(checkpoint, name) for checkpoint in checkpoints)
    assert torch.equal(first, second) and not torch.equal(first, third)
    assert 0.5 < first.float().std().item() * 64**0.5 < 2


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    folder = write(tmp_path / "k", "--shards", "3")
    first, second, third = sorted(folder.glob("*.safetensors"))
    kept = first.stat().st_mtime_ns, first.read_bytes()
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    third.rename(third.with_name(f"{third.name}.partial"))
    write(tmp_path / "k", "--shards", "3")
    assert (first.stat().st_mtime_ns, first.read_bytes()) == kept
    assert second.read_bytes() == whole and third.exists()
    assert not list(folder.glob("*.partial"))


def test_little_is_held_at_a_time(tmp_path: Path) -> None:
    """A table of 64 MB in pieces of some MB."""
    tracemalloc.start()
    try:
        run = [make_checkpoint.plain("language_model.lm_head.weight", (8192, 4096))]
        progress = make_checkpoint.LoadProgress(1, "test")
        make_checkpoint.write_file(tmp_path / "one.safetensors", run, 0, progress)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20
    assert (tmp_path / "one.safetensors").stat().st_size > 64 << 20


def test_unknown_fields_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_checkpoint.main(["--out", str(tmp_path), "--set", "hidden=3"]) == 1
    assert "--set hidden: text_config has no such field" in capsys.readouterr().err
