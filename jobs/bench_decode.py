#!/usr/bin/env python3
"""Tokens per second of tree, chain and plain decoding, and of transformers on the same weights.

    python jobs/bench_decode.py --out benchmarks/results

One process, no Ray: what is compared is decoding. Every repetition runs all ways one after the
other, so that a slow moment of the machine hits all alike; medians are reported with their spread.
The outputs of all ways are compared token by token before anything is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from record import Record

from kdray import LLM, EngineConfig, SamplingParams
from kdray.demo.text import held_out_prompts
from kdray.engine import resolve
from kdray.errors import KdrayError
from kdray.model.chat import encode_chat
from kdray.model.tokenizer import Tokenizer

Prompts = list[list[int]]


@dataclass(frozen=True)
class Outcome:
    """What one run gave. accept_length is None where nothing was drafted."""

    token_ids: list[list[int]]
    seconds: float
    accept_length: float | None

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


@dataclass(frozen=True)
class Way:
    """One way to decode: its name, its budget and how to run it."""

    mode: str
    budget: int
    run: Callable[[Prompts], Outcome]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    if not arguments.no_transformers and (missing := missing_transformers()) is not None:
        print(f"error: {missing}", file=sys.stderr)
        return 1
    record = Record("decode", vars(arguments) | {"out": None}, arguments.out)
    for batch in arguments.batches:
        bench(arguments, batch, record)
    record.finish()
    return 0


def missing_transformers() -> str | None:
    """What to do about it, before anything is loaded; None where it is there."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        return (
            f"cannot import transformers ({error}): install it, or leave it out of the comparison "
            "with --no-transformers"
        )
    return None


def bench(arguments: argparse.Namespace, batch: int, record: Record) -> None:
    ways = [engine_way(arguments, "tree", budget, batch) for budget in arguments.budgets]
    ways.append(engine_way(arguments, "chain", 7, batch))
    ways.append(engine_way(arguments, "plain", 0, batch))
    if not arguments.no_transformers:
        ways.append(transformers_way(arguments, batch))
    prompts = story_prompts(arguments, max(arguments.prompts, batch))
    check_equal(ways, prompts)
    runs = [[way.run(prompts) for way in ways] for _ in range(arguments.repeats)]
    for index, way in enumerate(ways):
        outcomes = [run[index] for run in runs]
        record.add(
            {"mode": way.mode, "budget": way.budget, "batch": batch, "temperature": 0.0},
            {"tokens_per_s": [outcome.tokens_per_s for outcome in outcomes]},
            {"accept_length_mean": outcomes[0].accept_length},
        )


def engine_way(arguments: argparse.Namespace, mode: str, budget: int, batch: int) -> Way:
    llm = LLM(
        EngineConfig(
            model=arguments.model,
            drafter=arguments.drafter,
            device=arguments.device,
            threads=arguments.threads,
            mode=mode,
            budget=budget,
            max_requests=batch,
            kv_memory_bytes=1 << 30,  # several engines share the device
        )
    )
    sampling = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True)

    def run(prompts: Prompts) -> Outcome:
        start = time.perf_counter()
        done = llm.generate(prompts, sampling)
        seconds = time.perf_counter() - start
        lengths = [length for completion in done for length in completion.accept_lengths]
        mean = sum(lengths) / len(lengths) if lengths else None
        return Outcome([completion.token_ids for completion in done], seconds, mean)

    return Way(mode, budget, run)


def transformers_way(arguments: argparse.Namespace, batch: int) -> Way:
    """Greedy generate() with its KV cache, left-padded batches, float32, the same threads."""
    from transformers import AutoModelForCausalLM

    facts = resolve(EngineConfig(model=arguments.model, device=arguments.device, mode="plain"))
    model = AutoModelForCausalLM.from_pretrained(facts.target, dtype=facts.dtype)
    model = model.to(facts.device).eval()

    @torch.inference_mode()
    def run(prompts: Prompts) -> Outcome:
        start = time.perf_counter()
        token_ids: Prompts = []
        for first in range(0, len(prompts), batch):
            token_ids += generate(prompts[first : first + batch])
        return Outcome(token_ids, time.perf_counter() - start, None)

    def generate(prompts: Prompts) -> Prompts:
        width = max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output = model.generate(
            torch.tensor(padded, device=facts.device),
            attention_mask=torch.tensor(mask, device=facts.device),
            max_new_tokens=arguments.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[:, width:].tolist()

    return Way("transformers", 0, run)


def story_prompts(arguments: argparse.Namespace, count: int) -> Prompts:
    """Held-out story prompts through the model's chat template."""
    tokenizer = Tokenizer.from_folder(resolve(EngineConfig(model=arguments.model)).target)
    return [
        encode_chat(tokenizer, document.prompt_messages)
        for document in held_out_prompts("story", count, seed=11)
    ]


def check_equal(ways: Sequence[Way], prompts: Prompts) -> None:
    """All of kdray's ways must agree; transformers' own rounding may differ, and is counted."""
    outcomes = {(way.mode, way.budget): way.run(prompts).token_ids for way in ways}
    plain = outcomes["plain", 0]
    for (mode, budget), token_ids in outcomes.items():
        if token_ids == plain:
            continue
        if mode != "transformers":
            raise SystemExit(f"{mode} {budget} differs from plain decoding")
        same = sum(a == b for a, b in zip(token_ids, plain, strict=True))
        print(f"transformers equals plain in {same} of {len(plain)} outputs")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KdrayError as error:
        sys.exit(str(error))
