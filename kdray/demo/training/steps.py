"""Training steps: optimiser, schedule, the whole step in one CUDA graph, loss curves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Budget:
    """How long to train: a number of steps, or seconds that become steps once a step is timed."""

    seconds: float
    steps: int | None = None


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to ``peak``, then a cosine down to ``floor`` of it."""

    peak: float
    warmup: int
    floor: float = 0.02

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of a step."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, steps - self.warmup))
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass
class Curve:
    """Mean losses by step, one list a named quantity."""

    steps: list[int] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, step: int, losses: dict[str, float]) -> None:
        """Append one point."""
        self.steps.append(step)
        for name, value in losses.items():
            self.losses.setdefault(name, []).append(round(value, 4))


class Trainer:
    """Repeats one step: ``loss_of`` writes nothing but what it returns; sums stay on the device.

    ``loss_of()`` gives the loss to minimise, first, and other named losses to record. ``after``
    runs inside the step, after the update. On a GPU everything is one captured graph, so shapes are
    static and the learning rate is a device tensor.
    """

    EVERY = 25

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        weight_decay: float,
        loss_of: Callable[[], dict[str, Tensor]],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.schedule = schedule
        self.loss_of = loss_of
        self.after = after
        self.rate = torch.zeros((), device=self.device)
        self.sums: dict[str, Tensor] = {}
        self.optimizer = self._optimizer(weight_decay)
        self.run_step: Callable[[], None] = self._step

    def train(
        self, budget: Budget, before: Callable[[int], None], log: Callable[[str], None]
    ) -> Curve:
        """Train within ``budget``; ``before(step)`` fills the static inputs of the step."""
        before(0)
        if self.device.type == "cuda":
            self.run_step = self._captured()
        curve, started, timed = Curve(), time.perf_counter(), 0.0
        steps = budget.steps or self.schedule.warmup
        step = 0
        while step < steps:
            self.rate.fill_(self.schedule.rate(step, steps))
            before(step)
            self.run_step()
            step += 1
            if step % self.EVERY == 0 or step == steps:
                losses = self._mean_losses(step - (curve.steps[-1] if curve.steps else 0))
                curve.add(step, losses)
                if len(curve.steps) % 20 == 1:
                    log(f"step {step}/{steps} {time.perf_counter() - started:.0f}s {losses}")
            if step == self.EVERY:
                timed = time.perf_counter()
            if step == 3 * self.EVERY and budget.steps is None:
                each = (time.perf_counter() - timed) / (2 * self.EVERY)
                steps = max(self.schedule.warmup + 1, int(budget.seconds / each))
        curve.seconds = time.perf_counter() - started
        return curve

    def _optimizer(self, weight_decay: float) -> torch.optim.AdamW:
        matrices = [p for p in self.parameters if p.dim() >= 2]
        vectors = [p for p in self.parameters if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        captured = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, 0.95), fused=captured, capturable=captured,
            foreach=False if not captured else None,
        )  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        return optimizer

    def _step(self) -> None:
        # The cache of casted weights would outlive a captured step.
        with torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.device.type == "cuda",
            cache_enabled=False,
        ):
            losses = self.loss_of()
        next(iter(losses.values())).backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            self.after()
            for name, value in losses.items():
                self.sums.setdefault(name, torch.zeros((), device=self.device)).add_(value.detach())

    def _captured(self) -> Callable[[], None]:
        """The step as a graph; its warm-up runs at learning rate zero and changes no weight."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        for total in self.sums.values():
            total.zero_()
        return graph.replay

    def _mean_losses(self, steps: int) -> dict[str, float]:
        means = {name: float(total) / steps for name, total in self.sums.items()}
        for total in self.sums.values():
            total.zero_()
        return means
