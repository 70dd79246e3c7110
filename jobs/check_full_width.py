#!/usr/bin/env python3
"""Whether a target of Kimi K2.6's full widths computes what its checkpoint says, on this machine.

    python jobs/check_full_width.py --device cuda --out benchmarks/results

Writes a checkpoint of random weights (4 layers, 384 INT4 experts: 27 GB), and for each dtype
* compares attention and MLP of every layer with a reference that dequantises the experts and
  multiplies in float32, on the same inputs: long and short prompts, trees, a single row;
* compares logits at the end of all layers, errors adding up;
* decodes requests, greedy and drawn, by trees in CUDA graphs on one GPU and over --ranks GPUs, and
  plainly on one: the same tokens, or where they part the two stood closer in the reference than the
  logits are exact, or the model's own passes over that text, in other orders and with inputs nudged
  in their last place, part there too (causes.py): by `rounding`, or by `experts` that it chooses.

In float32 experts are held dequantised, so that line has a checkpoint of fewer. Prints a row as it
is found and one JSON last; exits 1 where a row is not good.

What is allowed. u = 2^-8 is the most that rounding to bf16 changes a number by, relatively; a
typical change is 0.4 u. In an MLP some six roundings follow one another, independent, so that
sqrt(6) * 0.4 u = 1 u is expected; 2 u are allowed. Attention has ten, and its softmax turns errors
of scores of a few units into relative ones of its weights: 4 u. The worst row may have twice as
much. Logits, where both halves of all layers add up, are compared by the experts that the model
chose, with how far they move in the reference when every half of it is off at random by what is
allowed to it. Experts may be others than the reference's where scores, which move by less than
1 u, are as near as that. In float32 nothing is rounded that the reference leaves exact, but sums of
up to 18,432 terms have another order: sqrt(18,432) * 2^-24 = 2^-17 stands for 2 u. Two tokens are a
near tie within twice the greatest difference of any logit from the reference's that was met. Of
passes that explain a parting the two furthest apart must be as exact, by the experts each visits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import wide_checkpoint
from decode_ways import Decoded, decode_on_ranks, draw_visits, run_ranks
from full_width_judge import Finding, way_finding
from full_width_rank import check_alone, save_logits
from make_checkpoint import KIMI, read_config
from record import Record

from kdray.config import EngineConfig
from kdray.errors import ConfigError, KdrayError
from kdray.model.config import ModelConfig

SHARED_MEMORY = Path("/dev/shm")
MOST_TOKENS = 256  # of a request


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    record = Record("full_width", {"argv": [str(a) for a in argv or sys.argv[1:]]}, arguments.out)
    try:
        check_ranks(arguments)
        good = all([check_line(dtype, arguments, record) for dtype in arguments.dtypes])
    except (KdrayError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    record.finish()
    return 0 if good else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--ranks", type=int, default=2, help="a GPU each; 1: on one alone")
    add("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    add("--experts", type=int, default=384, help="a layer, in bfloat16")
    add("--float32-experts", type=int, default=48, help="a layer, in float32")
    add("--layers", type=int, default=4)
    add("--set", default="", metavar="NAME=VALUE,..", help="fields of text_config to change")
    add("--folder", type=Path, help="for checkpoints; default: shared memory, or a temporary one")
    add("--requests", type=int, default=8)
    add("--tokens", type=int, default=48, help="of a reply at most")
    add("--budget", type=int, default=16, help="draft nodes of a tree")
    add("--batch-invariant", action="store_true", help="trees and plain decoding say the same")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=min(16, os.cpu_count() or 1), help="that write")
    add("--out", type=Path, help="folder of the results file")
    return parser.parse_args(argv)


def check_ranks(arguments: argparse.Namespace) -> None:
    gpus = torch.cuda.device_count()
    if arguments.device == "cuda" and gpus < arguments.ranks:
        raise ConfigError(
            f"{arguments.ranks} ranks want as many GPUs and there are {gpus}; give --ranks 1"
        )


def check_line(dtype: str, arguments: argparse.Namespace, record: Record) -> bool:
    """One dtype's checks, on a checkpoint of its own."""
    experts = arguments.experts if dtype == "bfloat16" else arguments.float32_experts
    changes = f"num_hidden_layers={arguments.layers},n_routed_experts={experts},{arguments.set}"
    fields = read_config(KIMI, changes)
    with tempfile.TemporaryDirectory(prefix="full-width-", dir=place(arguments, fields)) as name:
        folder = Path(name)
        write(folder, fields, dtype, arguments, record)
        start = time.perf_counter()
        good = check_folder(folder, dtype, arguments, record)
        record.add({"dtype": dtype, "stage": "check"}, {}, {"s": time.perf_counter() - start})
        return good


def place(arguments: argparse.Namespace, fields: dict[str, Any]) -> Path | None:
    """Shared memory where it has the room; None: the system's temporary folder."""
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        return Path(arguments.folder)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return SHARED_MEMORY if free > 1.1 * wide_checkpoint.bytes_of(fields) else None


def write(
    folder: Path,
    fields: dict[str, Any],
    dtype: str,
    arguments: argparse.Namespace,
    record: Record,
) -> None:
    start, threads = time.perf_counter(), arguments.threads
    options = argparse.Namespace(
        shards=2 * threads, seed=arguments.seed, threads=threads, draft_layers=1
    )
    wide_checkpoint.write(folder, fields, options)
    seconds = time.perf_counter() - start
    gigabytes = sum(path.stat().st_size for path in folder.rglob("*.safetensors")) / 1e9
    params = {"dtype": dtype, "stage": "write", "folder": str(folder.parent)}
    record.add(params, {}, {"gb": gigabytes, "s": seconds, "gbps": gigabytes / seconds})


def check_folder(folder: Path, dtype: str, arguments: argparse.Namespace, record: Record) -> bool:
    config = EngineConfig(
        model=str(folder / "target"),
        drafter=str(folder / "drafter"),
        device=arguments.device,
        dtype=dtype,  # type: ignore[arg-type]
        tp=arguments.ranks,
        budget=arguments.budget,
        candidates=arguments.budget,
        max_requests=arguments.requests,
        max_model_len=MOST_TOKENS,
        batch_invariant=arguments.batch_invariant and dtype == "bfloat16",
    )
    tokens = wide_checkpoint.tokens_in_play(ModelConfig.from_folder(config.model).vocab_size)
    visits = draw_visits(
        tokens, count=arguments.requests, length=arguments.tokens, seed=arguments.seed
    )
    good = True

    def hear(finding: Finding) -> None:
        nonlocal good
        good &= finding.good
        params = {"dtype": dtype, **finding.params}
        record.add(params, {}, {**finding.metrics, "good": float(finding.good)})

    ways: dict[str, Decoded] = {}
    saved = folder / "logits.pt" if config.tp > 1 else None
    if saved is not None:
        name = f"tree, {config.tp} ranks"
        after = partial(save_logits, tokens=tokens, path=saved)
        ways[name] = decode_on_ranks(config, visits, after)
        hear(way_finding(name, ways[name]))
    alone = replace(config, tp=1, draft_tp=None)
    run_ranks(1, check_alone, alone, tokens, visits, ways, saved, hear=hear)
    return good


if __name__ == "__main__":
    sys.exit(main())
