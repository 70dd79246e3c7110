"""What check_full_width does on one device: layers, logits, and the ways that tokens went."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NamedTuple

import torch
from decode_ways import Decoded, build_alone, decode, plain_engine, set_up
from dequantised import load_reference
from full_width_judge import Finding, Judge, Params, way_finding
from layer_errors import (
    BlurredPasses,
    ErrorSize,
    LayerByLayer,
    Passes,
    ToldPasses,
    known_rows,
    size_of_error,
    tree_rows,
)
from torch import Tensor
from traffic import Visit

from kdray.config import EngineConfig
from kdray.model.batch import ForwardBatch
from kdray.model.moe import PackedMoE
from kdray.model.target import TargetModel

# check_full_width.py says why.
ALLOWED = {torch.bfloat16: 2 * 2.0**-8, torch.float32: 2.0**-17}
SOFTMAX = 2  # times as much for attention
WORST_ROW = 2
BLURS = 3  # draws
REQUESTS, PROMPT, LONG_PROMPT = 4, 60, 320
PARENT = (-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 8, 8, 10, 3, 13, 14)  # of a tree's nodes
Steps = Mapping[str, ForwardBatch]


class Logits(NamedTuple):
    """of: how many ranks; found: [T, V] of every step; chosen: the experts, as in Passes."""

    of: str
    found: dict[str, Tensor]
    chosen: list[Tensor]


def check_alone(
    rank: int,
    port: int,
    config: EngineConfig,
    tokens: Sequence[int],
    visits: list[Visit],
    ways: Mapping[str, Decoded],
    saved: Path | None,
    said: SimpleQueue[Finding],
) -> None:
    """As a process of its own; says a finding as soon as there is one.

    tokens   that texts are made of
    ways     that other processes went, to be compared with plain decoding
    saved    their logits
    """
    set_up(config)
    for finding in findings(config, tokens, visits, ways, saved):
        said.put(finding)


def findings(
    config: EngineConfig,
    tokens: Sequence[int],
    visits: list[Visit],
    ways: Mapping[str, Decoded],
    saved: Path | None,
) -> Iterator[Finding]:
    engine, verifier = build_alone(config)
    tree = decode(engine, visits)
    engine.driver.close()
    plain = decode(plain_engine(config, verifier), visits)
    model = verifier.model
    is_packed = any(isinstance(layer.mlp, PackedMoE) for layer in model.layers)
    reference = load_reference(Path(config.model), engine.facts.device, rounded=not is_packed)
    steps = steps_of(tokens, engine.facts.device)
    yield from layer_findings(model, reference, steps)
    ends = list(logit_findings(model, reference, steps, saved))
    yield from ends
    yield way_finding("tree, 1 rank", tree)
    yield way_finding("plain, 1 rank", plain)
    error = max(finding.metrics["max_abs"] for finding in ends)
    judge = Judge(model, reference, engine.facts.kv_row, visits, plain, error)
    yield judge.against_reference()
    for name, way in {"tree, 1 rank": tree, **ways}.items():
        must_equal = config.batch_invariant and name == "tree, 1 rank"
        for finding in judge.against_plain(name, way):
            good = finding.good and not (must_equal and finding.metrics.get("differing"))
            yield replace(finding, good=good)


def steps_of(tokens: Sequence[int], device: torch.device) -> Steps:
    """In this order, as trees stand behind the prompts."""
    dice = random.Random(0)

    def texts(count: int, length: int) -> list[list[int]]:
        return [dice.choices(tokens, k=length) for _ in range(count)]

    return {
        "prompts": known_rows(texts(REQUESTS, PROMPT), device),
        "long prompt": known_rows(texts(1, LONG_PROMPT), device, first=REQUESTS),
        "trees": tree_rows(texts(REQUESTS, len(PARENT)), PARENT, [PROMPT] * REQUESTS, device),
        "one row": tree_rows(texts(1, 1), PARENT[:1], [PROMPT], device),
    }


def layer_findings(model: TargetModel, reference: TargetModel, steps: Steps) -> Iterator[Finding]:
    layers = LayerByLayer(model, reference, REQUESTS + 1)
    allowed = ALLOWED[model.embedding.dtype]
    for step, batch in steps.items():
        for error in layers.compare(batch):
            params: Params = {
                "step": step,
                "layer": error.layer,
                "part": error.part,
                "rows": error.rows,
            }
            factor = SOFTMAX if error.part == "attention" else 1
            finding = error_finding(params, error.size, factor * allowed)
            swaps = {"swapped": float(error.swapped), "swap_margin": error.swap_margin}
            yield Finding(
                params, finding.metrics | swaps, finding.good and error.swap_margin <= allowed / 2
            )


def logit_findings(
    model: TargetModel, reference: TargetModel, steps: Steps, saved: Path | None
) -> Iterator[Finding]:
    """Behind all layers, errors adding up; `saved` by several ranks, which ran the same steps."""
    passes = Passes(model, REQUESTS + 1)
    found = {step: passes.logits(batch) for step, batch in steps.items()}
    yield from _logit_findings(model, reference, steps, Logits("1 rank", found, passes.chosen))
    if saved is not None:
        logits = torch.load(saved, map_location=model.embedding.device, weights_only=False)
        yield from _logit_findings(model, reference, steps, logits)


def _logit_findings(
    model: TargetModel, reference: TargetModel, steps: Steps, logits: Logits
) -> Iterator[Finding]:
    allowed = ALLOWED[model.embedding.dtype]
    passes: list[Passes] = [ToldPasses(reference, REQUESTS + 1, list(logits.chosen))]
    for seed in range(BLURS):
        chosen, sizes = list(logits.chosen), (SOFTMAX * allowed, allowed)
        passes.append(BlurredPasses(reference, REQUESTS + 1, chosen, sizes, seed))
    for step, batch in steps.items():
        wanted, *blurred = (each.logits(batch) for each in passes)
        due = [size_of_error(moved, wanted) for moved in blurred]
        size = size_of_error(logits.found[step], wanted)
        params: Params = {"step": step, "part": f"logits, {logits.of}", "rows": len(wanted)}
        whole, row = max(each.relative for each in due), max(each.worst_row for each in due)
        metrics = {**size._asdict(), "allowed": whole, "allowed_row": WORST_ROW * row}
        good = size.relative <= whole and size.worst_row <= WORST_ROW * row
        yield Finding(params, metrics, good)


def save_logits(model: TargetModel, tokens: Sequence[int], path: Path) -> None:
    """By all ranks together: what steps_of(tokens) gives."""
    passes = Passes(model, REQUESTS + 1)
    steps = steps_of(tokens, model.embedding.device)
    found = {step: passes.logits(batch) for step, batch in steps.items()}
    if model.shard.rank == 0:
        torch.save(Logits(f"{model.shard.size} ranks", found, passes.chosen), path)


def error_finding(params: Params, size: ErrorSize, allowed: float) -> Finding:
    metrics = {**size._asdict(), "allowed": allowed}
    whole = size.relative <= allowed or params["rows"] == 1
    return Finding(params, metrics, whole and size.worst_row <= WORST_ROW * allowed)
