"""The whole training, from a seed to files: the order of its parts and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from kdray.demo.gates import (
    AcceptLengths,
    Gate,
    Quality,
    acceptance_gates,
    quality_gates,
    table_of,
)
from kdray.demo.tokenizer import DemoTokenizer, load_tokenizer, train_tokenizer
from kdray.demo.training.corpus import documents_of, pack_corpus
from kdray.demo.training.export import parameter_count, save_drafter, save_target
from kdray.demo.training.measure import (
    HeldOutTexts,
    HeldOutWish,
    answer_held_out,
    in_dtype,
    judge,
    measure_acceptance,
)
from kdray.demo.training.restore import load_drafter, load_target
from kdray.demo.training.shapes import seed_of
from kdray.demo.training.steps import Budget, Curve
from kdray.demo.training.target import DemoTarget
from kdray.demo.training.train_drafter import (
    DrafterRecipe,
    TextsWish,
    TrainedDrafter,
    train_drafter,
    write_texts,
)
from kdray.demo.training.train_target import (
    TargetRecipe,
    TrainedTarget,
    packed_loss,
    train_target,
)

Qualities: TypeAlias = Mapping[float, Mapping[str, Quality]]
WISHED_CHAIN = 4.5
"""The story accept length at T = 0, as a chain of 7, that the kept drafter should be nearest to."""


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    out: Path
    seed: int
    device: torch.device
    target: Budget
    drafters: tuple[Budget, ...]
    target_recipe: TargetRecipe = field(default_factory=TargetRecipe)
    drafter_recipe: DrafterRecipe = field(default_factory=DrafterRecipe)
    tokenizer_documents: int = 30_000
    documents: int = 1_600_000
    processes: int = 15
    drafter_texts: int = 32_768
    texts_at_once: int = 4096
    held_out: int = 400
    stop_after: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A trained drafter with its accept lengths and its gates."""

    trained: TrainedDrafter
    accept_lengths: Mapping[float, AcceptLengths]
    gates: tuple[Gate, ...]

    @property
    def story_chain(self) -> float:
        """Accept length on greedy stories, chain of 7."""
        return self.accept_lengths[0.0]["chain_7"]["story"]


def smoke_plan(out: Path, seed: int) -> Plan:
    """Everything once in seconds on a CPU: loadable files of an untrained quality."""
    return Plan(
        out=out, seed=seed, device=torch.device("cpu"),
        target=Budget(0.0, steps=3), drafters=(Budget(0.0, steps=2),),
        target_recipe=TargetRecipe(batch=1), drafter_recipe=DrafterRecipe(batch=2, roots=4),
        tokenizer_documents=2000, documents=64, processes=1, drafter_texts=2, texts_at_once=2,
        held_out=1, stop_after=8,
    )  # fmt: skip


class Clock:
    """Prints and remembers how long each part took."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """The time since the last lap belongs to ``part``."""
        now = time.perf_counter()
        self.seconds[part] = round(now - self.last, 1)
        self.last = now
        print(f"[{part}: {self.seconds[part]} s]", flush=True)


def run(plan: Plan) -> None:
    """Tokenizer, documents, target, its texts, drafters, gates, files."""
    clock = Clock()
    tokenizer = _tokenizer(plan)
    clock.lap("tokenizer")
    trained = _target(plan, tokenizer, clock)
    # Written before the drafters exist, so that a run that breaks there leaves a target.
    unlearnt = trained.model.embed_tokens.weight[-2:-1]
    save_target(trained.model, tokenizer, unlearnt, plan.out / "target")
    held_out = answer_held_out(
        trained.model, tokenizer, HeldOutWish(plan.held_out, plan.seed, plan.stop_after)
    )
    qualities = judge(held_out, tokenizer)
    _print_qualities(qualities)
    clock.lap("answers")
    candidates = _drafters(plan, trained.model, tokenizer, held_out, clock)
    kept = min(candidates, key=lambda c: abs(c.story_chain - WISHED_CHAIN))
    mask_row = kept.trained.model.mask_row
    save_target(trained.model, tokenizer, mask_row, plan.out / "target")
    save_drafter(kept.trained.model, trained.model.shape, tokenizer, plan.out / "drafter")
    gates = (*quality_gates(qualities[0.0]), *kept.gates)
    print(table_of(gates), flush=True)
    _write_training(plan, trained, candidates, candidates.index(kept), clock)
    _write_figures(plan, qualities, kept.accept_lengths, gates)


def measure(plan: Plan, files: Path) -> None:
    """Only measure the files of ``files`` (its folders target and drafter); write figures.json."""
    tokenizer = load_tokenizer(files / "target")
    target = load_target(files / "target").to(plan.device)
    drafter = load_drafter(files / "drafter", target, tokenizer).to(plan.device)
    held_out = answer_held_out(
        target, tokenizer, HeldOutWish(plan.held_out, plan.seed, plan.stop_after)
    )
    qualities = judge(held_out, tokenizer)
    _print_qualities(qualities)
    lengths = measure_acceptance(target, drafter, held_out)
    _print_lengths("shipped", lengths)
    gates = (*quality_gates(qualities[0.0]), *acceptance_gates(lengths))
    print(table_of(gates), flush=True)
    _write_figures(plan, qualities, lengths, gates)


def _tokenizer(plan: Plan) -> DemoTokenizer:
    documents = documents_of(seed_of(plan.seed, "tokenizer"), plan.tokenizer_documents)
    tokenizer = train_tokenizer(turn.content for d in documents for turn in d.turns)
    print(f"{len(tokenizer.base)} base tokens", flush=True)
    return tokenizer


def _target(plan: Plan, tokenizer: DemoTokenizer, clock: Clock) -> TrainedTarget:
    packed = pack_corpus(tokenizer, plan.seed, plan.documents, plan.processes).to(plan.device)
    fresh = pack_corpus(tokenizer, seed_of(plan.seed, "fresh"), 300, 1).to(plan.device)
    positions = packed.tokens.numel()
    used = int((packed.segment > 0).sum())
    print(f"{len(packed.tokens)} rows, {used / positions:.1%} full, {used / 1e6:.1f} M tokens")
    clock.lap("corpus")
    seed = seed_of(plan.seed, "target")
    trained = train_target(packed, plan.target_recipe, plan.target, seed)
    rows = torch.arange(min(2 * plan.target_recipe.batch, len(fresh.tokens)), device=plan.device)
    with torch.no_grad():
        loss = float(packed_loss(trained.model, fresh, rows))
    trained.curve.losses["fresh_nats_per_token"] = [round(loss, 4)]
    print(f"{parameter_count(trained.model)} parameters, fresh text {loss:.4f} nats/token")
    clock.lap("target")
    return trained


def _drafters(
    plan: Plan,
    target: DemoTarget,
    tokenizer: DemoTokenizer,
    held_out: HeldOutTexts,
    clock: Clock,
) -> list[Candidate]:
    cuda = plan.device.type == "cuda"
    fast = in_dtype(target, torch.bfloat16) if cuda else target
    wish = TextsWish(
        plan.drafter_texts, plan.texts_at_once, seed_of(plan.seed, "texts"), plan.stop_after
    )
    texts = write_texts(fast, tokenizer, wish)
    print(f"{int((texts.end - texts.prompt).sum())} answer tokens", flush=True)
    clock.lap("drafter texts")
    candidates = []
    for budget in plan.drafters:
        seed = seed_of(plan.seed, f"drafter {budget}")
        trained = train_drafter(target, texts, plan.drafter_recipe, budget, seed)
        lengths = measure_acceptance(target, trained.model, held_out)
        candidate = Candidate(trained, lengths, tuple(acceptance_gates(lengths)))
        candidates.append(candidate)
        _print_lengths(f"drafter {budget.seconds:g}s", lengths)
        clock.lap(f"drafter {budget.seconds:g}")
    return candidates


def _print_qualities(qualities: Qualities) -> None:
    for temperature, by_kind in qualities.items():
        for quality in by_kind.values():
            print(
                f"T={temperature} {quality.kind:9s} n={quality.n} strict {quality.strict:.3f} "
                f"facts {quality.facts:.3f} skeletons {quality.skeletons} "
                f"floor {quality.floor_nats_per_token:.3f}"
            )
            for failure in quality.failures[:3]:
                print(f"    {failure[:300]}")


def _print_lengths(name: str, lengths: Mapping[float, AcceptLengths]) -> None:
    for temperature, modes in lengths.items():
        for mode, by_kind in modes.items():
            figures = "  ".join(f"{kind} {length:.2f}" for kind, length in by_kind.items())
            print(f"{name} T={temperature} {mode:9s} {figures}", flush=True)


def _write_training(
    plan: Plan, target: TrainedTarget, candidates: Sequence[Candidate], kept: int, clock: Clock
) -> None:
    """curves.json: what was asked for, how long it took, and every loss curve."""
    record = {
        "plan": asdict(replace(plan, out=Path("."))),
        "seconds": clock.seconds,
        "target": _curve(target.curve),
        "drafters": [
            {**_curve(candidate.trained.curve), "accept_lengths": candidate.accept_lengths}
            for candidate in candidates
        ],
        "kept_drafter": kept,
    }
    plan.out.joinpath("curves.json").write_text(json.dumps(record, default=str) + "\n")


def _write_figures(
    plan: Plan, qualities: Qualities, lengths: Mapping[float, AcceptLengths], gates: Sequence[Gate]
) -> None:
    """figures.json: what the files of this folder reach on held-out prompts."""
    record = {
        "held_out_per_kind": plan.held_out,
        "seed": plan.seed,
        "quality": {t: {k: asdict(q) for k, q in by.items()} for t, by in qualities.items()},
        "accept_lengths": lengths,
        "gates": [{**asdict(gate), "passed": gate.passed} for gate in gates],
    }
    plan.out.joinpath("figures.json").write_text(json.dumps(record, indent=1) + "\n")


def _curve(curve: Curve) -> dict[str, Any]:
    return {**asdict(curve), "seconds": round(curve.seconds, 1)}
