"""The gates measured by the training job itself, on its own device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.demo.gates import POOLED, TEMPERATURES, Quality, judge_answers
from kdray.demo.text import KINDS, Document, Kind, held_out_prompts
from kdray.demo.tokenizer import DemoTokenizer
from kdray.demo.training.drafter import DemoDrafter
from kdray.demo.training.generation import GeneratedTexts, Sampling, generate
from kdray.demo.training.replay import Rounds, replay
from kdray.demo.training.target import DemoTarget

LENGTH = 384


@dataclass(frozen=True)
class HeldOutTexts:
    """Held-out documents of all kinds in order, and the target's texts by temperature."""

    documents: tuple[Document, ...]
    texts: Mapping[float, GeneratedTexts]

    def rows(self, kind: Kind | None = None) -> list[int]:
        """Rows of one kind, or all."""
        return [i for i, d in enumerate(self.documents) if kind in (None, d.last.kind)]


@dataclass(frozen=True)
class HeldOutWish:
    """How many prompts a kind; ``stop_after`` as in ``Sampling``."""

    per_kind: int
    seed: int
    stop_after: int | None = None


def answer_held_out(
    target: DemoTarget, tokenizer: DemoTokenizer, wish: HeldOutWish
) -> HeldOutTexts:
    """The target's answers to held-out prompts of every kind, at both temperatures."""
    documents = tuple(d for kind in KINDS for d in held_out_prompts(kind, wish.per_kind, wish.seed))
    prompts = [tokenizer.encode_prompt(document.prompt_turns) for document in documents]
    torch.manual_seed(wish.seed)
    texts = {}
    for temperature in TEMPERATURES:
        sampling = Sampling(torch.full((len(prompts),), temperature), LENGTH, wish.stop_after)
        texts[temperature] = generate(target, prompts, sampling, tokenizer)
    return HeldOutTexts(documents, texts)


def judge(held_out: HeldOutTexts, tokenizer: DemoTokenizer) -> dict[float, dict[str, Quality]]:
    """Quality by temperature and kind."""
    qualities: dict[float, dict[str, Quality]] = {}
    end_mark = tokenizer.special_ids["<|im_end|>"]
    for temperature, texts in held_out.texts.items():
        qualities[temperature] = {}
        for kind in KINDS:
            rows = held_out.rows(kind)
            documents = [held_out.documents[row] for row in rows]
            answers = [
                tokenizer.decode(t for t in texts.answer(row) if t != end_mark) for row in rows
            ]
            lengths = [len(tokenizer.encode(d.last.answer)) + 1 for d in documents]
            qualities[temperature][kind] = judge_answers(documents, answers, lengths)
    return qualities


def measure_acceptance(
    target: DemoTarget, drafter: DemoDrafter, held_out: HeldOutTexts
) -> dict[float, dict[str, dict[str, float]]]:
    """Accept lengths by temperature, mode and kind."""
    return {
        temperature: {
            mode: _by_kind(held_out, rounds)
            for mode, rounds in replay(target, drafter, texts).items()
        }
        for temperature, texts in held_out.texts.items()
    }


def _by_kind(held_out: HeldOutTexts, rounds: Rounds) -> dict[str, float]:
    lengths: dict[str, float] = {kind: rounds.accept_length(held_out.rows(kind)) for kind in KINDS}
    return {**lengths, POOLED: rounds.accept_length(held_out.rows())}


def in_dtype(target: DemoTarget, dtype: torch.dtype) -> DemoTarget:
    """A copy of the target with weights in ``dtype``."""
    moved = copy.deepcopy(target).to(dtype)
    for router, original in zip(moved.routers(), target.routers(), strict=True):
        bias: Tensor = original.e_score_correction_bias
        router.e_score_correction_bias = bias.clone()
    return moved
