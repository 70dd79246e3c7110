"""A router in the hands of another, which chooses otherwise or looks on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kdray.kernels.ops import LiveRows
from kdray.model.moe import Routing


class OtherRouter:
    """Stands where a layer's router stood and does as that one does; `choose` is for others.

    router   that one, or another of these
    """

    def __init__(self, router: Any) -> None:
        self.router = router

    def route(self, x: Tensor, live: LiveRows | None = None) -> Routing:
        return self.choose(self.logits(x), live)

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.router.logits(x)
        return found

    def logits_beside(self, x: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.router.logits_beside(x, gate_up)
        return found

    def choose(self, logits: Tensor, live: LiveRows | None = None) -> Routing:
        routing: Routing = self.router.choose(logits, live)
        return routing
