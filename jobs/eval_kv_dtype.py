#!/usr/bin/env python3
"""What fp8 latents change on the demo model: greedy tokens and accept lengths, beside bf16's.

    python jobs/eval_kv_dtype.py --out benchmarks/results

Held-out prompts of every kind are answered in bfloat16, once over each kind of cache, by trees and
plainly. Two texts are compared up to where they part, since behind that they are two texts:

parted_per_token         texts that part, over tokens looked at: the chance that a token differs
accept_length            tokens a step of the trees
accept_length_change     of fp8, relative to bf16
texts_differing_from_plain   over the same cache; 0 but for near-ties, as bfloat16's sums depend on
                         how many rows a step has

Ends with status 1 where fp8 parts more often, or accepts much less, than it may.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record import Record

from kdray import LLM, Completion, EngineConfig, SamplingParams
from kdray.config import KVDType, Mode
from kdray.demo.text import KINDS, held_out_prompts
from kdray.model.chat import encode_chat

MOST_PARTED_PER_TOKEN = 0.005  # 0.0015 over 80 texts; 0.010 with scales a quarter off
MOST_ACCEPT_LENGTH_CHANGE = 0.03


@dataclass(frozen=True, slots=True)
class Difference:
    """How far texts go together: `parted` of them part, `tokens` were looked at until then."""

    parted: int
    tokens: int

    @property
    def per_token(self) -> float:
        return self.parted / max(self.tokens, 1)

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Difference:
        parted = tokens = 0
        for text, other in zip(texts, others, strict=True):
            same = _together(text, other)
            parts = same < max(len(text), len(other))
            parted += parts
            tokens += same + parts
        return cls(parted, tokens)


def _together(text: Sequence[int], other: Sequence[int]) -> int:
    """Tokens until the first that differs, or until one of the two ends."""
    for n, (mine, theirs) in enumerate(zip(text, other, strict=False)):
        if mine != theirs:
            return n
    return min(len(text), len(other))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    record = Record("kv_dtype", vars(arguments) | {"out": None}, arguments.out)
    texts: dict[KVDType, list[list[int]]] = {}
    lengths: dict[KVDType, float] = {}
    for kv_dtype in ("bf16", "fp8"):
        trees, plainly = (answers(arguments, kv_dtype, mode) for mode in ("tree", "plain"))
        texts[kv_dtype] = [completion.token_ids for completion in plainly]
        lengths[kv_dtype] = accept_length(trees)
        differing = sum(
            completion.token_ids != text
            for completion, text in zip(trees, texts[kv_dtype], strict=True)
        )
        metrics = {
            "accept_length": lengths[kv_dtype],
            "texts_differing_from_plain": float(differing),
        }
        record.add({"kv_dtype": kv_dtype, "texts": len(plainly)}, {}, metrics)
    difference = Difference.of(texts["fp8"], texts["bf16"])
    change = lengths["fp8"] / lengths["bf16"] - 1
    metrics = {
        "parted": float(difference.parted),
        "parted_per_token": difference.per_token,
        "accept_length_change": change,
    }
    record.add({"kv_dtype": "fp8 beside bf16", "tokens": difference.tokens}, {}, metrics)
    record.finish()
    kept = difference.per_token <= MOST_PARTED_PER_TOKEN and change >= -MOST_ACCEPT_LENGTH_CHANGE
    return 0 if kept else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--threads", type=int, default=None)
    add("--per-kind", type=int, default=40, help="prompts of each kind")
    add("--max-tokens", type=int, default=256)
    add("--budget", type=int, default=16)
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=None, help="folder of the results file")
    return parser.parse_args(argv)


def answers(arguments: argparse.Namespace, kv_dtype: KVDType, mode: Mode) -> list[Completion]:
    config = EngineConfig(
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        mode=mode,
        budget=arguments.budget,
        device=arguments.device,
        threads=arguments.threads,
    )
    with LLM(config) as llm:
        prompts = [
            encode_chat(llm.tokenizer, document.prompt_messages)
            for kind in KINDS
            for document in held_out_prompts(kind, arguments.per_kind, arguments.seed)
        ]
        return llm.generate(prompts, SamplingParams(max_tokens=arguments.max_tokens))


def accept_length(completions: Sequence[Completion]) -> float:
    """Tokens a step, pooled."""
    lengths = [length for completion in completions for length in completion.accept_lengths]
    return sum(lengths) / max(len(lengths), 1)


if __name__ == "__main__":
    sys.exit(main())
