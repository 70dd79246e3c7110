#!/usr/bin/env python3
"""Writes a checkpoint of random weights in the layout of Kimi K2.6, of any size.

    python jobs/make_checkpoint.py --out /data/k26-4 --set num_hidden_layers=4 --shards 8
    python jobs/make_checkpoint.py --out /data/k26 --drafter /data/k26-dflash
    python jobs/make_checkpoint.py --out small --set hidden_size=256,n_routed_experts=16,...
    python jobs/make_checkpoint.py --out k26-8 --set num_hidden_layers=8 --config-only

The names, the nested config, the packed INT4 experts with bf16 scales and the index are those of
the published model; --set changes fields of its text_config. Text made with it means nothing: what
counts is what it takes to load and to run. Numbers depend on --seed and a tensor's name alone, not
on --shards. Nothing larger than some MB is held; whole shards of a run that was cut short are kept.
--config-only writes no numbers: a folder for --load-format dummy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from kdray.arguments import HelpFormatter
from kdray.errors import ConfigError, KdrayError
from kdray.model.balanced_words import UNIFORM_STD, balanced
from kdray.model.checkpoint import INDEX, SINGLE
from kdray.model.config import INT4_GROUP, ModelConfig
from kdray.model.dflash_config import DFlashConfig, default_target_layer_ids
from kdray.model.dflash_weights import weight_shapes
from kdray.model.int4 import PER_WORD
from kdray.model.manifest import needed_tensors
from kdray.model.progress import LoadProgress
from kdray.model.stored import ITEM_BYTES

KIMI = Path(__file__).resolve().parent / "kimi_k26"
PREFIX = "language_model."
BEHIND_LAYERS = ("model.norm.weight", "lm_head.weight")
CHUNK = 2 << 20  # numbers drawn at a time
ONES = np.uint64(0x1111_1111_1111_1111)
Generator = np.random.Generator
Draw = Callable[[Generator, int], bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written: draw(generator, n) gives the bytes of its next n numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    draw: Draw

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        fields = read_config(arguments.config, arguments.set)
        if arguments.config_only:
            write_configs(fields, arguments)
            return 0
        write_target(arguments.out, fields, arguments)
        if arguments.drafter is not None:
            write_drafter(arguments.drafter, fields["text_config"], arguments)
    except (KdrayError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="of the target")
    add("--config", type=Path, default=KIMI, metavar="FOLDER", help="whose config.json is taken")
    add("--set", default="", metavar="NAME=VALUE,..", help="fields of text_config to change")
    add("--shards", type=int, default=64, metavar="N", help="files of the target")
    add("--drafter", type=Path, metavar="FOLDER", help="write a DFlash drafter for it there, too")
    add("--draft-layers", type=int, default=6, metavar="N", help="of the drafter")
    add("--config-only", action="store_true", help="config.json alone, of both")
    add("--seed", type=int, default=0, help="of all numbers")
    add("--threads", type=int, default=min(8, os.cpu_count() or 1), help="files written at a time")
    return parser.parse_args(argv)


def read_config(folder: Path, changes: str) -> dict[str, Any]:
    """The nested config with some fields of its text_config changed."""
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for change in filter(None, changes.split(",")):
        name, _, value = change.partition("=")
        if name not in fields["text_config"]:
            raise ConfigError(f"--set {name}: text_config has no such field")
        try:
            fields["text_config"][name] = json.loads(value)
        except json.JSONDecodeError:
            raise ConfigError(f"--set {name} wants a value, as {name}=8, got {value!r}") from None
        if name == "num_attention_heads":
            fields["text_config"]["num_key_value_heads"] = fields["text_config"][name]
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):  # inside a smaller vocabulary
        for place in (fields, fields["text_config"]):
            place[name] = min(place[name], fields["text_config"]["vocab_size"] - 1)
    return fields


def write_configs(fields: Mapping[str, Any], options: argparse.Namespace) -> None:
    """What --load-format dummy needs."""
    write_target_config(options.out, fields)
    if options.drafter is not None:
        write_draft_config(options.drafter, fields["text_config"], options.draft_layers)


def write_target_config(folder: Path, fields: Mapping[str, Any]) -> ModelConfig:
    """Checked by reading it again; one that is refused does not stay for the next command."""
    path = folder / "config.json"
    write_json(path, fields)
    try:
        return ModelConfig.from_folder(folder)
    except KdrayError:
        path.unlink()
        raise


def write_target(
    folder: Path,
    fields: Mapping[str, Any],
    options: argparse.Namespace,
    change: Callable[[Planned], Planned] = lambda tensor: tensor,
) -> None:
    """options: shards, seed and threads; change: of what is drawn, for who wants other numbers."""
    config = write_target_config(folder, fields)
    tensors = [change(t) for t in target_tensors(config, fields.get("vision_config", {}))]
    shards = split(tensors, options.shards)
    names = [f"model-{i + 1:05}-of-{len(shards):06}.safetensors" for i in range(len(shards))]
    weight_map = {t.name: file for file, shard in zip(names, shards, strict=True) for t in shard}
    total = sum(t.num_bytes for t in tensors)
    files = dict(zip(names, shards, strict=True))
    write_files(folder, files, options)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX, index)


def write_drafter(
    folder: Path,
    text: Mapping[str, Any],
    options: argparse.Namespace,
    change: Callable[[Planned], Planned] = lambda tensor: tensor,
) -> None:
    """A DFlash drafter that fits the target; options: draft_layers, seed and threads."""
    config = write_draft_config(folder, text, options.draft_layers)
    tensors = [change(plain(name, shape)) for name, shape in weight_shapes(config)]
    write_files(folder, {SINGLE: tensors}, options)


def write_draft_config(folder: Path, text: Mapping[str, Any], draft_layers: int) -> DFlashConfig:
    fields = json.loads((KIMI / "drafter" / "config.json").read_text())
    fields |= {name: text[name] for name in ("hidden_size", "vocab_size", "intermediate_size")}
    layers = text["num_hidden_layers"]
    fields |= {"num_target_layers": layers, "num_hidden_layers": draft_layers}
    taps = default_target_layer_ids(max(layers, 4), draft_layers)
    fields["dflash_config"] = {
        "mask_token_id": min(163_838, text["vocab_size"] - 2),
        "target_layer_ids": sorted({min(tap, layers - 1) for tap in taps}),
    }
    write_json(folder / "config.json", fields)
    return DFlashConfig.from_folder(folder)


def target_tensors(config: ModelConfig, vision: Mapping[str, Any]) -> Iterator[Planned]:
    """All tensors, the head behind the layers, and some of the vision part."""
    for needed in sorted(needed_tensors(config), key=lambda n: n.name in BEHIND_LAYERS):
        name = PREFIX + needed.name
        if needed.is_expert and config.quantization == "int4":
            yield from packed(name, *needed.shape)
        else:
            yield plain(f"{name}.weight" if needed.is_linear else name, needed.shape)
    if vision:
        width = vision["vt_hidden_size"]
        yield plain("vision_tower.encoder.final_layernorm.weight", (width,))
        yield plain("mm_projector.pre_norm.weight", (width,))


def plain(name: str, shape: tuple[int, ...]) -> Planned:
    """bf16, or fp32 for the router's bias; scaled so that activations neither fade nor explode."""
    if name.endswith("e_score_correction_bias"):
        return Planned(name, "F32", shape, lambda g, n: normal(g, n, 0.01).tobytes())
    if len(shape) == 1:
        return Planned(name, "BF16", shape, lambda g, n: bf16(1 + normal(g, n, 0.1)))
    spread = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
    return Planned(name, "BF16", shape, lambda g, n: bf16(normal(g, n, spread)))


def packed(name: str, outputs: int, inputs: int) -> Iterator[Planned]:
    """The three tensors of an INT4 linear: any word is eight valid weights."""
    typical = inputs**-0.5 / UNIFORM_STD

    def words(generator: Generator, count: int) -> bytes:
        raw = generator.integers(0, 2**64 - 1, -(-count // 2), dtype=np.uint64, endpoint=True)
        return bytes(balanced(raw, ONES).tobytes()[: 4 * count])

    def scales(generator: Generator, count: int) -> bytes:
        return bf16(generator.uniform(0.5, 1.5, count).astype(np.float32) * np.float32(typical))

    def shape(_: Generator, count: int) -> bytes:
        return np.array([outputs, inputs], dtype=np.int32)[:count].tobytes()

    yield Planned(f"{name}.weight_packed", "I32", (outputs, inputs // PER_WORD), words)
    yield Planned(f"{name}.weight_scale", "BF16", (outputs, inputs // INT4_GROUP), scales)
    yield Planned(f"{name}.weight_shape", "I32", (2,), shape)


def normal(generator: Generator, count: int, spread: float) -> np.ndarray[Any, Any]:
    return generator.standard_normal(count, dtype=np.float32) * np.float32(spread)


def bf16(values: np.ndarray[Any, Any]) -> bytes:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().tobytes()


def split(tensors: Sequence[Planned], shards: int) -> list[list[Planned]]:
    """Runs of tensors, of about the same number of bytes each; none is empty."""
    total, done, shards = sum(t.num_bytes for t in tensors), 0, min(shards, len(tensors))
    runs: list[list[Planned]] = [[]]
    for i, tensor in enumerate(tensors):
        is_full = done * shards >= total * len(runs)
        are_few = len(tensors) - i == shards - len(runs)
        if runs[-1] and len(runs) < shards and (is_full or are_few):
            runs.append([])
        runs[-1].append(tensor)
        done += tensor.num_bytes
    return runs


def write_files(
    folder: Path, files: Mapping[str, Sequence[Planned]], options: argparse.Namespace
) -> None:
    total = sum(tensor.num_bytes for run in files.values() for tensor in run)
    with (
        LoadProgress(total, f"writing {folder}") as progress,
        ThreadPoolExecutor(max(1, options.threads)) as pool,
    ):
        jobs = [
            pool.submit(write_file, folder / file, run, options.seed, progress)
            for file, run in files.items()
        ]
        for job in jobs:
            job.result()
    print(f"{folder}: {len(files)} files, {total / 1e9:.2f} GB", flush=True)


def write_file(path: Path, run: Sequence[Planned], seed: int, progress: LoadProgress) -> None:
    """One safetensors file, under its name once it is whole."""
    header = header_of(run)
    if path.exists() and path.stat().st_size == len(header) + sum(t.num_bytes for t in run):
        with path.open("rb") as file:
            if file.read(len(header)) == header:
                progress.add(sum(t.num_bytes for t in run))
                return
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(header)
        for tensor in run:
            generator = Generator(np.random.SFC64([seed, zlib.crc32(tensor.name.encode())]))
            for first in range(0, tensor.size, CHUNK):
                progress.add(file.write(tensor.draw(generator, min(CHUNK, tensor.size - first))))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # what was written need not push others out of memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    partial.rename(path)


def header_of(run: Sequence[Planned]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in run:
        end = at + tensor.num_bytes
        entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        entries[tensor.name], at = entry, end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return struct.pack("<Q", len(body)) + body


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
