"""What the demo model must reach on held-out prompts, whoever measured it.

The training job measures by replay on the GPU, ``jobs/eval_demo.py`` through the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kdray.demo.text import Document, check_answer
from kdray.demo.text.skeleton import count_skeletons

BUDGETS = (4, 7, 8, 16, 32)
DEPTH = 7
TEMPERATURES = (0.0, 0.8)
POOLED = "all"

AcceptLengths: TypeAlias = Mapping[str, Mapping[str, float]]
"""Accept length by mode ("chain_7", "tree_16", ...), then by kind or ``POOLED``."""


@dataclass(frozen=True)
class Quality:
    """Answers of one kind at one temperature: shares that pass, and how varied they are."""

    kind: str
    n: int
    strict: float
    facts: float
    skeletons: int
    floor_nats_per_token: float
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gate:
    """One requirement: ``low <= value <= high``."""

    name: str
    value: float
    low: float
    high: float = float("inf")

    @property
    def passed(self) -> bool:
        """Whether the value lies within the limits."""
        return self.low <= self.value <= self.high


def judge_answers(
    documents: Sequence[Document], answers: Sequence[str], answer_tokens: Iterable[int]
) -> Quality:
    """Check one answer for each held-out document of one kind.

    ``answer_tokens`` are the lengths of the *documents'* answers in tokens, end marks included:
    they turn the grammar's own information into its floor, nats a token.
    """
    verdicts = [
        check_answer(document.last, answer)
        for document, answer in zip(documents, answers, strict=True)
    ]
    failures = tuple(
        f"{verdict.reason} | {answer}"
        for verdict, answer in zip(verdicts, answers, strict=True)
        if not verdict.strict
    )
    return Quality(
        kind=documents[0].last.kind,
        n=len(verdicts),
        strict=sum(verdict.strict for verdict in verdicts) / len(verdicts),
        facts=sum(verdict.facts for verdict in verdicts) / len(verdicts),
        skeletons=count_skeletons(answers),
        floor_nats_per_token=sum(d.last.choice_nats for d in documents) / sum(answer_tokens),
        failures=failures[:12],
    )


def quality_gates(greedy: Mapping[str, Quality]) -> list[Gate]:
    """The gates on greedy answers, for the kinds that were measured."""
    limits = {"story": 0.90, "problem": 0.98, "function": 0.95}
    return [
        Gate(f"{kind} right, T=0", greedy[kind].facts, low)
        for kind, low in limits.items()
        if kind in greedy
    ]


def acceptance_gates(by_temperature: Mapping[float, AcceptLengths]) -> list[Gate]:
    """The gates on accept lengths, for the modes that were measured."""
    gates: list[Gate] = []
    greedy, sampled = (by_temperature.get(t, {}) for t in TEMPERATURES)
    chain = f"chain_{DEPTH}"
    if "story" in greedy.get(chain, {}):
        gates.append(Gate("story chain of 7, T=0", greedy[chain]["story"], 3.0, 6.0))
    if {chain, "tree_16"} <= greedy.keys():
        ratio = greedy["tree_16"]["story"] / greedy[chain]["story"]
        gates.append(Gate("story tree of 16 / chain, T=0", ratio, 1.10))
    if {chain, "tree_16"} <= sampled.keys():
        ratio = sampled["tree_16"][POOLED] / sampled[chain][POOLED]
        gates.append(Gate("pooled tree of 16 / chain, T=0.8", ratio, 1.10))
    for temperature, lengths in by_temperature.items():
        for budget in BUDGETS:
            tree, equal = f"tree_{budget}", f"chain_{min(budget, DEPTH)}"
            if {tree, equal} <= lengths.keys():
                ratio = lengths[tree][POOLED] / lengths[equal][POOLED]
                gates.append(Gate(f"{tree} / {equal}, T={temperature}", ratio, 0.99))
    return gates


def table_of(gates: Iterable[Gate]) -> str:
    """One line a gate."""
    return "\n".join(
        f"{'pass' if gate.passed else 'FAIL'}  {gate.name:36s} {gate.value:7.3f}"
        f"  (>= {gate.low}{'' if gate.high == float('inf') else f', <= {gate.high}'})"
        for gate in gates
    )
