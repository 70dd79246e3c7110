"""Drives a DFlash drafter through rounds of random trees, and remembers what was committed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from kdray.core.plan import AcceptedPaths, PlannedRequest, StepPlan
from kdray.core.request import SamplingParams
from kdray.kernels.ops import load_ops
from kdray.model.drafter import DFlashDrafter
from tests.model.tiny_drafter import write_drafter, write_target


class WatchedOps:
    """The reference ops, with the logits of the last topk_logprob kept."""

    def __init__(self) -> None:
        self._ops = load_ops("cpu")
        self.logits: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def topk_logprob(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.logits = logits
        return self._ops.topk_logprob(logits, k)


def load(
    folder: Path, config: dict[str, Any], *, page_size: int = 4, num_pages: int = 64, **wishes: Any
) -> tuple[DFlashDrafter, WatchedOps]:
    """A random drafter of this config; its cache holds NaN wherever nothing was written."""
    ops = WatchedOps()
    drafter = DFlashDrafter.load(
        write_drafter(folder / "drafter", config),
        write_target(folder / "target", config),
        ops=ops,  # type: ignore[arg-type]
        candidates=wishes.pop("candidates", 4),
        page_size=page_size,
        num_pages=num_pages,
        **wishes,
    )
    for cache in drafter.cache:
        cache.fill_(float("nan"))
    return drafter, ops


def tables_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "target" / "model.safetensors")


class Rounds:
    """Requests with their page tables, and the features of every committed token.

    known   per request: the features [C, F] of all tokens before its root, in order
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        *,
        num_requests: int,
        page_size: int,
        num_pages: int,
        seed: int,
    ) -> None:
        self.drafter = drafter
        self._dice = random.Random(seed)
        self._torch = torch.Generator().manual_seed(seed)
        pages = list(range(num_pages))
        self._dice.shuffle(pages)  # scattered over the cache, shared by nobody
        share = num_pages // num_requests
        self._pages = [pages[r * share : (r + 1) * share] for r in range(num_requests)]
        self._page_size = page_size
        width = drafter.network.config.hidden_size * len(drafter.taps)
        self.known = [torch.zeros(0, width) for _ in range(num_requests)]

    def prefill(self, lengths: Sequence[int]) -> None:
        """One step with a prompt chunk of each request, none for length 0; all of it gets known."""
        plan = self.plan(known=lengths, budgets=[0] * len(lengths))
        taking_part = tuple(request for request in plan.requests if len(request.known))
        chunks = StepPlan(step=0, requests=taking_part)
        self._extend(chunks, nodes=[1] * len(taking_part), paths=[[0]] * len(taking_part))

    def step(self, budgets: Sequence[int]) -> None:
        """One step of drafts, of which a random ascending path is accepted."""
        nodes = [1 + budget for budget in budgets]
        paths = []
        for budget in budgets:
            accepted = self._dice.randint(0, min(budget, self.drafter.depth))
            paths.append([0, *sorted(self._dice.sample(range(1, budget + 1), accepted))])
        self._extend(self.plan(known=[1] * len(budgets), budgets=budgets), nodes, paths)

    def plan(self, known: Sequence[int], budgets: Sequence[int]) -> StepPlan:
        requests = tuple(
            PlannedRequest(
                request_id=f"r{r}",
                slot=r,
                num_cached=len(self.known[r]),
                known=np.full(length, 7, dtype=np.int32),
                budget=budget,
                pages=self._page_table(r, len(self.known[r]) + length + budget),
                samples=True,
                sampling=SamplingParams(),
                seed=0,
                num_prompt=1,
            )
            for r, (length, budget) in enumerate(zip(known, budgets, strict=True))
        )
        return StepPlan(step=0, requests=requests)

    def _page_table(self, r: int, positions: int) -> np.ndarray:
        needed = -(-positions // self._page_size)
        assert needed <= len(self._pages[r]), "the test wants more pages"
        return np.array(self._pages[r][:needed], dtype=np.int32)

    def _extend(self, plan: StepPlan, nodes: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        row_start = [0]
        for request, count in zip(plan.requests, nodes, strict=True):
            row_start.append(row_start[-1] + len(request.known) + count - 1)
        width = self.known[0].shape[1]
        features = torch.randn(row_start[-1], width, generator=self._torch)
        node = torch.full((len(paths), 1 + self.drafter.depth), -99, dtype=torch.int32)
        for r, path in enumerate(paths):
            node[r, : len(path)] = torch.tensor(path, dtype=torch.int32)
            first, known = row_start[r], len(plan.requests[r].known)
            rows = [*range(first, first + known), *(first + known - 1 + i for i in path[1:])]
            owner = plan.requests[r].slot
            self.known[owner] = torch.cat([self.known[owner], features[rows]])
        length = torch.tensor([len(path) for path in paths], dtype=torch.int32)
        accepted = AcceptedPaths(node=node, length=length, bonus=torch.zeros_like(length))
        self.drafter.extend(plan, accepted, features, row_start)
