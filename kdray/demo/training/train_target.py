"""Training of the target on packed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kdray.demo.training.corpus import PackedCorpus
from kdray.demo.training.shapes import TargetShape
from kdray.demo.training.steps import Budget, Curve, Schedule, Trainer
from kdray.demo.training.target import DemoTarget

BALANCE_SPEED = 0.001


@dataclass(frozen=True)
class TargetRecipe:
    """Numbers of the training; ``batch`` rows a step."""

    batch: int = 40
    peak: float = 3e-3
    warmup: int = 300
    weight_decay: float = 0.1


@dataclass(frozen=True)
class TrainedTarget:
    """The target with fp32 weights that are exact in bf16, and its loss curve."""

    model: DemoTarget
    curve: Curve


def train_target(
    corpus: PackedCorpus,
    recipe: TargetRecipe,
    budget: Budget,
    seed: int,
    log: Callable[[str], None] = print,
) -> TrainedTarget:
    """Train a target on ``corpus``, on the device where the corpus lies."""
    device = corpus.tokens.device
    torch.manual_seed(seed)
    model = DemoTarget(TargetShape()).to(device).train()
    batch = torch.zeros(recipe.batch, dtype=torch.int64, device=device)
    order = _row_order(len(corpus.tokens), recipe.batch, seed, device)

    def loss_of() -> dict[str, Tensor]:
        return {"nats_per_token": packed_loss(model, corpus, batch)}

    def balance() -> None:
        for router in model.routers():
            router.balance(BALANCE_SPEED)

    def fill(step: int) -> None:
        batch.copy_(order[step % len(order)])

    trainer = Trainer(
        model, Schedule(recipe.peak, recipe.warmup), recipe.weight_decay, loss_of, balance
    )
    curve = trainer.train(budget, fill, log)
    model.eval().requires_grad_(False)
    round_to_bf16(model)
    return TrainedTarget(model, curve)


def packed_loss(model: DemoTarget, corpus: PackedCorpus, rows: Tensor) -> Tensor:
    """Mean cross entropy over the learnt tokens of some rows [B] of the corpus."""
    tokens, segment = corpus.tokens[rows].long(), corpus.segment[rows]
    learnt = corpus.learnt[rows][:, 1:] & (segment[:, 1:] == segment[:, :-1])
    logits = model(tokens, document_mask(segment)).logits
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
    )
    weight = learnt.flatten().float()
    return (losses * weight).sum() / weight.sum().clamp(min=1.0)


def document_mask(segment: Tensor) -> Tensor:
    """Additive mask [B, 1, S, S]: causal, and within one document."""
    length = segment.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment.device).tril()
    visible = (segment[:, :, None] == segment[:, None, :]) & causal
    mask = torch.zeros(visible.shape, device=segment.device)
    return mask.masked_fill(~visible, float("-inf"))[:, None]


def round_to_bf16(model: torch.nn.Module) -> None:
    """Round all parameters to what a bf16 file can hold; biases of routers stay fp32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def _row_order(rows: int, batch: int, seed: int, device: torch.device) -> Tensor:
    """Row numbers of one pass, shuffled, [steps, batch]; later passes repeat it."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(rows, generator=generator)
    if rows < batch:
        shuffled = shuffled.repeat(-(-batch // rows))
    return shuffled[: len(shuffled) // batch * batch].view(-1, batch).to(device)
