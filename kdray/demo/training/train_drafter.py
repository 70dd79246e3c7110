"""Training of a drafter on the target's own continuations."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kdray.demo.text import Turn, sample_document
from kdray.demo.tokenizer import DemoTokenizer
from kdray.demo.training.drafter import DemoDrafter
from kdray.demo.training.generation import GeneratedTexts, Sampling, generate
from kdray.demo.training.shapes import DrafterShape
from kdray.demo.training.steps import Budget, Curve, Schedule, Trainer
from kdray.demo.training.target import DemoTarget
from kdray.demo.training.train_target import round_to_bf16

LENGTH = 384
LONGEST_PROMPT = 256
SAMPLED_TEMPERATURE = 0.8


@dataclass(frozen=True)
class DrafterRecipe:
    """Numbers of the training: texts and random roots a text in each step."""

    batch: int = 64
    roots: int = 20
    peak: float = 1.5e-3
    warmup: int = 200
    weight_decay: float = 0.01
    decay: float = 4.0


@dataclass(frozen=True)
class TrainedDrafter:
    """The drafter with fp32 weights that are exact in bf16, and its loss curve."""

    model: DemoDrafter
    curve: Curve


@dataclass(frozen=True)
class TextsWish:
    """How many texts, how many at once; ``stop_after`` as in ``Sampling``."""

    count: int
    batch: int
    seed: int
    stop_after: int | None = None


def write_texts(target: DemoTarget, tokenizer: DemoTokenizer, wish: TextsWish) -> GeneratedTexts:
    """Continuations of fresh prompts, half greedy and half at T = 0.8."""
    rng = random.Random(wish.seed)
    torch.manual_seed(wish.seed)
    parts = []
    for _ in range(-(-wish.count // wish.batch)):
        prompts = [_prompt(rng, tokenizer) for _ in range(min(wish.batch, wish.count))]
        temperature = torch.zeros(len(prompts))
        temperature[1::2] = SAMPLED_TEMPERATURE
        sampling = Sampling(temperature, LENGTH, wish.stop_after)
        parts.append(generate(target, prompts, sampling, tokenizer))
    return GeneratedTexts(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.prompt for part in parts]),
        torch.cat([part.end for part in parts]),
    )


def _prompt(rng: random.Random, tokenizer: DemoTokenizer) -> list[int]:
    """A document of the training text, cut before a random answer."""
    while True:
        turns = sample_document(rng).turns
        answers = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
        spoken: tuple[Turn, ...] = turns[: rng.choice(answers)]
        prompt = tokenizer.encode_prompt(spoken)
        if len(prompt) <= LONGEST_PROMPT:
            return prompt


def train_drafter(
    target: DemoTarget,
    texts: GeneratedTexts,
    recipe: DrafterRecipe,
    budget: Budget,
    seed: int,
    log: Callable[[str], None] = print,
) -> TrainedDrafter:
    """Train a drafter against the frozen ``target``, on the device of ``texts``."""
    device = texts.tokens.device
    torch.manual_seed(seed)
    drafter = DemoDrafter(DrafterShape()).to(device)
    rows = torch.zeros(recipe.batch, dtype=torch.int64, device=device)
    chances = torch.zeros(recipe.batch, recipe.roots, device=device)
    generator = torch.Generator(device).manual_seed(seed)

    def loss_of() -> dict[str, Tensor]:
        roots = _roots(texts, rows, chances)
        return _drafter_losses(target, drafter, texts, rows, roots, recipe.decay)

    def fill(step: int) -> None:
        rows.random_(0, len(texts.tokens), generator=generator)
        chances.uniform_(generator=generator)

    schedule = Schedule(recipe.peak, recipe.warmup)
    trainer = Trainer(drafter, schedule, recipe.weight_decay, loss_of)
    curve = trainer.train(budget, fill, log)
    drafter.eval().requires_grad_(False)
    round_to_bf16(drafter)
    return TrainedDrafter(drafter, curve)


def _roots(texts: GeneratedTexts, rows: Tensor, chances: Tensor) -> Tensor:
    """Roots [B, A] from the prompt's last token to the answer's last but one."""
    first, last = texts.prompt[rows] - 1, texts.end[rows] - 2
    span = (last - first + 1).clamp(min=1)
    return first[:, None] + (chances * span[:, None]).long()


def _drafter_losses(
    target: DemoTarget,
    drafter: DemoDrafter,
    texts: GeneratedTexts,
    rows: Tensor,
    roots: Tensor,
    decay: float,
) -> dict[str, Tensor]:
    """The weighted loss over slots, first, and the mean loss at slots 1, 4 and 7."""
    tokens = texts.tokens[rows]
    with torch.no_grad():
        features = target(tokens).features
    logits = drafter(target, tokens, features, roots).float()
    truth, there = next_tokens(tokens, texts.end[rows], roots, drafter.shape.depth)
    losses = F.cross_entropy(logits.flatten(0, 2), truth.flatten(), reduction="none")
    losses = losses.view(truth.shape) * there
    slots = torch.arange(drafter.shape.depth, device=tokens.device)
    weight = torch.exp(-slots / decay)
    by_slot = losses.sum((0, 1)) / there.sum((0, 1)).clamp(min=1)
    total = (losses * weight).sum() / (there * weight).sum()
    return {"weighted": total, "slot_1": by_slot[0], "slot_4": by_slot[3], "slot_7": by_slot[6]}


def next_tokens(tokens: Tensor, end: Tensor, roots: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The ``depth`` tokens after each root [B, A, depth], and whether they are before the end."""
    places = roots[:, :, None] + 1 + torch.arange(depth, device=tokens.device)
    there = places < end[:, None, None]
    places = places.clamp(max=tokens.shape[1] - 1)
    return tokens.gather(1, places.flatten(1)).view(places.shape), there
