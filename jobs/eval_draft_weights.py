#!/usr/bin/env python3
"""What fewer bits in the drafter's weights do to accept lengths on the demo model, and save.

    python jobs/eval_draft_weights.py --out benchmarks/results

Held-out prompts of every kind are answered by chains and trees, the drafter's weights kept as

whole             what the drafter runs in
int4              its MLPs in INT4, groups of 32, as --draft-weights int4
int8              its MLPs in INT8, groups of 32: emulated, there is no such kernel
int4 everywhere   attention and the features' projection as well: emulated too

accept_length   tokens a step, pooled; the prompt's own step not counted
change          of it, relative to whole; texts are the same, so steps are compared text by text
change_error    its standard error
differing       texts that are not plain decoding's: none, on a CPU
gb              of the drafter's weights, this one's and Kimi K2.6's, whole being bf16

Ends with status 1 where int4 surely loses more than 3 %, or where texts differ on a CPU.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from record import Record
from safetensors.torch import load_file, save_file
from torch import Tensor

from kdray import LLM, Completion, EngineConfig, SamplingParams, demo
from kdray.config import DraftWeightType, Mode
from kdray.demo.text import KINDS, held_out_prompts
from kdray.model.chat import encode_chat
from kdray.model.dflash_config import DFlashConfig
from kdray.model.dflash_weights import weight_shapes

GROUP = 32
BITS = {"whole": 16, "int8": 8, "int4": 4, "int4 everywhere": 4}
DEPTH = 7  # of the demo's drafter, and so of its longest chain
KIMI = Path(__file__).resolve().parent / "kimi_k26" / "drafter"
MOST_LOST = 0.03
SURE = 2  # standard errors beyond that


@dataclass(frozen=True, slots=True)
class Kept:
    """A drafter whose weights are kept in one way: its folder, and the engine's wish."""

    name: str
    folder: Path
    wish: DraftWeightType


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    record = Record("draft_weights", vars(arguments) | {"out": None}, arguments.out)
    add_bytes(record)
    with tempfile.TemporaryDirectory(prefix="kdray-draft-") as home:
        drafters = [each for each in kept_drafters(Path(home)) if each.name in arguments.weights]
        good = all([evaluate(arguments, t, drafters, record) for t in arguments.temperatures])
    record.finish()
    return 0 if good else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--threads", type=int, default=None)
    add("--weights", nargs="+", choices=list(BITS), default=list(BITS), help="whole among them")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    add("--budgets", type=int, nargs="+", default=[8, 16, 32], help="of trees")
    add("--per-kind", type=int, default=40, help="prompts of each kind")
    add("--max-tokens", type=int, default=160)
    add("--max-requests", type=int, default=32)
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    if "whole" not in arguments.weights:
        parser.error("--weights needs whole, beside which the others stand")
    return arguments


def kept_drafters(home: Path) -> list[Kept]:
    """The demo's drafter, and copies of it that hold rounded numbers where there is no kernel."""
    own = demo.drafter_path()
    return [
        Kept("whole", own, "auto"),
        Kept("int8", rounded_copy(own, home / "int8", bits=8, everywhere=False), "auto"),
        Kept("int4", own, "int4"),
        Kept("int4 everywhere", rounded_copy(own, home / "int4", bits=4, everywhere=True), "auto"),
    ]


def rounded_copy(folder: Path, copy: Path, *, bits: int, everywhere: bool) -> Path:
    """A drafter's folder with matrices rounded, held in fp32: its MLPs', or all."""
    copy.mkdir()
    shutil.copy(folder / "config.json", copy)
    tensors = {
        name: rounded(weight, bits) if rounds(name, weight.dim(), everywhere) else weight.float()
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, copy / "model.safetensors")
    return copy


def rounds(name: str, dims: int, everywhere: bool) -> bool:
    return ".mlp." in name or (everywhere and dims == 2)


def rounded(weight: Tensor, bits: int) -> Tensor:
    """[out, in] -> the nearest of 2^bits steps over a group's range, whose scale is bf16."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    half = 1 << (bits - 1)
    scale = (groups.abs().amax(-1, keepdim=True) / (half - 0.5)).bfloat16().float()
    steps = (groups / scale.clamp_min(torch.finfo(torch.float32).tiny)).round()
    return (steps.clamp(-half, half - 1) * scale).flatten(-2)


def add_bytes(record: Record) -> None:
    for name, bits in BITS.items():
        sizes = {
            f"{model}_gb": stored_bytes(DFlashConfig.from_folder(folder), name, bits) / 1e9
            for model, folder in (("demo", demo.drafter_path()), ("kimi_k26", KIMI))
        }
        record.add({"weights": name}, {}, sizes)


def stored_bytes(config: DFlashConfig, name: str, bits: int) -> float:
    """What is not rounded is bf16; a group's scale is too."""
    few = 2.0 if bits == 16 else bits / 8 + 2 / GROUP
    return sum(
        math.prod(shape) * (few if rounds(tensor, len(shape), name == "int4 everywhere") else 2)
        for tensor, shape in weight_shapes(config)
    )


def evaluate(
    arguments: argparse.Namespace, temperature: float, drafters: Sequence[Kept], record: Record
) -> bool:
    """Every way with every drafter at one temperature; whether all is as it may be."""
    ask = partial(answers, arguments, temperature)
    plain = [completion.token_ids for completion in ask(drafters[0], "plain", 0)]
    good = True
    ways: list[tuple[Mode, int]] = [("chain", DEPTH), *(("tree", b) for b in arguments.budgets)]
    for mode, budget in ways:
        whole: list[int] = []
        for kept in drafters:
            done = ask(kept, mode, budget)
            steps = [len(completion.accept_lengths) for completion in done]
            whole = whole or steps
            change, error = gained(whole, steps)
            differing = sum(c.token_ids != text for c, text in zip(done, plain, strict=True))
            record.add(
                {"weights": kept.name, "temperature": temperature, "mode": mode, "budget": budget},
                {},
                {
                    "accept_length": accept_length(done),
                    "change": change,
                    "change_error": error,
                    "differing": float(differing),
                },
            )
            lost = kept.name == "int4" and change + SURE * error < -MOST_LOST
            good &= not lost and not (differing and not torch.cuda.is_available())
    return good


def answers(
    arguments: argparse.Namespace, temperature: float, kept: Kept, mode: Mode, budget: int
) -> list[Completion]:
    config = EngineConfig(
        drafter=str(kept.folder),
        draft_weights=kept.wish,
        mode=mode,
        budget=budget,
        device=arguments.device,
        threads=arguments.threads,
        max_requests=arguments.max_requests,
    )
    with LLM(config) as llm:
        prompts = [
            encode_chat(llm.tokenizer, document.prompt_messages)
            for kind in KINDS
            for document in held_out_prompts(kind, arguments.per_kind, arguments.seed)
        ]
        sampling = [
            SamplingParams(
                max_tokens=arguments.max_tokens,
                temperature=temperature,
                seed=arguments.seed * 1_000_003 + row,  # equal seeds would draw equal noise
            )
            for row in range(len(prompts))
        ]
        return llm.generate(prompts, sampling)


def accept_length(completions: Sequence[Completion]) -> float:
    """Tokens a step, pooled. The prompt's own pass gives a first token, which is not counted."""
    tokens = sum(len(completion.token_ids) - 1 for completion in completions)
    return tokens / max(1, sum(len(completion.accept_lengths) for completion in completions))


def gained(whole: Sequence[int], steps: Sequence[int]) -> tuple[float, float]:
    """How much longer accepted paths are where texts took `steps` for `whole`, and its standard
    error over texts (of a ratio of sums, to first order)."""
    ratio = sum(whole) / sum(steps)
    rest = sum((old - ratio * new) ** 2 for old, new in zip(whole, steps, strict=True))
    return ratio - 1, math.sqrt(rest) / sum(steps)


if __name__ == "__main__":
    sys.exit(main())
