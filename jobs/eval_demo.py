#!/usr/bin/env python3
"""The demo model's gates, measured through the product.

    python jobs/eval_demo.py --out benchmarks/results

Held-out prompts of every kind are answered in every mode, at T = 0 and T = 0.8. All modes must
write the same text; its facts are checked once. HumanEval prompts are far from what the demo model
has learnt: they are run, if given, and reported as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record import Record

from kdray import LLM, Completion, EngineConfig, SamplingParams
from kdray.config import Mode
from kdray.demo.gates import (
    BUDGETS,
    DEPTH,
    POOLED,
    TEMPERATURES,
    Gate,
    Quality,
    acceptance_gates,
    judge_answers,
    quality_gates,
    table_of,
)
from kdray.demo.text import KINDS, Document, held_out_prompts
from kdray.model.chat import encode_chat
from kdray.model.tokenizer import Tokenizer

HUMANEVAL = "humaneval"


@dataclass(frozen=True)
class Way:
    """One way to decode. ``name`` is the one that the gates know: chain_7, tree_16, plain."""

    mode: Mode
    budget: int

    @property
    def name(self) -> str:
        return self.mode if self.mode == "plain" else f"{self.mode}_{self.budget}"


@dataclass(frozen=True)
class Asked:
    """All prompts in order, each with its kind; documents are those of the held-out kinds."""

    kinds: tuple[str, ...]
    prompts: tuple[list[int], ...]
    documents: tuple[Document, ...]

    def rows(self, kind: str) -> list[int]:
        if kind == POOLED:
            return [row for row, each in enumerate(self.kinds) if each != HUMANEVAL]
        return [row for row, each in enumerate(self.kinds) if each == kind]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    record = Record("eval_demo", wishes(arguments), arguments.out)
    gates: list[Gate] = []
    lengths: dict[float, dict[str, dict[str, float]]] = {}
    for temperature in arguments.temperatures:
        lengths[temperature], quality = evaluate(arguments, temperature, record)
        if temperature == 0.0:
            gates += quality_gates(quality)
    gates += acceptance_gates(lengths)
    print(table_of(gates))
    record.finish()
    return 0 if all(gate.passed for gate in gates) else 1


def wishes(arguments: argparse.Namespace) -> dict[str, object]:
    """The arguments as the record keeps them, without paths of files."""
    tried = arguments.humaneval is not None
    return {**vars(arguments), "out": None, HUMANEVAL: tried}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="demo", metavar="demo|PATH")
    add("--drafter", default="auto", metavar="auto|none|PATH")
    add("--device", default="auto")
    add("--threads", type=int, default=None)
    add("--max-requests", type=int, default=32)
    add("--max-tokens", type=int, default=192)
    add("--per-kind", type=int, default=100, help="held-out prompts of each kind")
    add("--budgets", type=int, nargs="+", default=list(BUDGETS))
    add("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))
    add("--seed", type=int, default=1)
    add("--humaneval", type=Path, help="HumanEval.jsonl, if it is to be tried")
    add("--out", type=Path, default=None, help="folder of the results file")
    return parser.parse_args(argv)


def evaluate(
    arguments: argparse.Namespace, temperature: float, record: Record
) -> tuple[dict[str, dict[str, float]], dict[str, Quality]]:
    """Accept lengths by way and kind, and quality by kind, at one temperature."""
    lengths: dict[str, dict[str, float]] = {}
    quality: dict[str, Quality] = {}
    reference: list[list[int]] = []
    for way in ways(arguments):
        llm = build(arguments, way)
        asked = ask(arguments, llm.tokenizer)
        done = llm.generate(asked.prompts, sampling(arguments, temperature, len(asked.prompts)))
        if not reference:
            reference = [completion.token_ids for completion in done]
            quality = judge(asked, done, llm.tokenizer)
            add_quality(record, temperature, quality)
        differing = sum(c.token_ids != r for c, r in zip(done, reference, strict=True))
        if way.mode != "plain":
            lengths[way.name] = accept_lengths(asked, done)
        add_way(record, temperature, way, lengths.get(way.name, {}), differing)
        llm.close()
    return lengths, quality


def ways(arguments: argparse.Namespace) -> list[Way]:
    """Plain decoding first: it is what the others must equal."""
    if arguments.drafter == "none":
        return [Way("plain", 0)]
    chains = sorted({min(budget, DEPTH) for budget in arguments.budgets} | {DEPTH})
    return [
        Way("plain", 0),
        *(Way("chain", budget) for budget in chains),
        *(Way("tree", budget) for budget in arguments.budgets),
    ]


def build(arguments: argparse.Namespace, way: Way) -> LLM:
    return LLM(
        EngineConfig(
            model=arguments.model,
            drafter=arguments.drafter,
            mode=way.mode,
            budget=way.budget,
            device=arguments.device,
            threads=arguments.threads,
            max_requests=arguments.max_requests,
        )
    )


def ask(arguments: argparse.Namespace, tokenizer: Tokenizer) -> Asked:
    documents = tuple(
        document
        for kind in KINDS
        for document in held_out_prompts(kind, arguments.per_kind, arguments.seed)
    )
    chats = [document.prompt_messages for document in documents]
    kinds: list[str] = [document.last.kind for document in documents]
    for task in humaneval(arguments.humaneval):
        chats.append([{"role": "user", "content": f"Complete this Python function.\n{task}"}])
        kinds.append(HUMANEVAL)
    return Asked(tuple(kinds), tuple(encode_chat(tokenizer, chat) for chat in chats), documents)


def humaneval(path: Path | None) -> list[str]:
    if path is None:
        return []
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines() if line.strip()]


def sampling(arguments: argparse.Namespace, temperature: float, count: int) -> list[SamplingParams]:
    """One seed a prompt: equal seeds at equal positions would draw equal noise."""
    return [
        SamplingParams(
            max_tokens=arguments.max_tokens,
            temperature=temperature,
            seed=arguments.seed * 1_000_003 + row,
        )
        for row in range(count)
    ]


def judge(asked: Asked, done: Sequence[Completion], tokenizer: Tokenizer) -> dict[str, Quality]:
    qualities: dict[str, Quality] = {}
    for kind in KINDS:
        rows = asked.rows(kind)
        documents = [asked.documents[row] for row in rows]
        tokens = [len(tokenizer.encode(document.last.answer)) + 1 for document in documents]
        qualities[kind] = judge_answers(documents, [done[row].text for row in rows], tokens)
    return qualities


def accept_lengths(asked: Asked, done: Sequence[Completion]) -> dict[str, float]:
    """Tokens a step, pooled. The prompt's own pass gives a first token, which is not counted, and
    what a last step accepted past the end is not counted either."""
    found: dict[str, float] = {}
    for kind in (*dict.fromkeys(asked.kinds), POOLED):
        completions = [done[row] for row in asked.rows(kind)]
        steps = sum(len(completion.accept_lengths) for completion in completions)
        tokens = sum(len(completion.token_ids) - 1 for completion in completions)
        if steps:
            found[kind] = tokens / steps
    return found


def add_quality(record: Record, temperature: float, qualities: Mapping[str, Quality]) -> None:
    for kind, quality in qualities.items():
        record.add(
            {"what": "quality", "temperature": temperature, "kind": kind, "n": quality.n},
            {},
            {
                "strict_fraction": quality.strict,
                "facts_fraction": quality.facts,
                "skeletons": float(quality.skeletons),
                "floor_nats_per_token": quality.floor_nats_per_token,
            },
        )


def add_way(
    record: Record, temperature: float, way: Way, lengths: Mapping[str, float], differing: int
) -> None:
    """``differing`` texts are not those of plain decoding; losslessness wants none."""
    metrics: dict[str, float | None] = {"texts_differing_from_plain": float(differing)}
    metrics |= {f"accept_length_{kind}": length for kind, length in lengths.items()}
    record.add(
        {"what": "way", "temperature": temperature, "mode": way.mode, "budget": way.budget},
        {},
        metrics,
    )


if __name__ == "__main__":
    sys.exit(main())
