"""What a rank's memory goes to, by figures, before any of it is taken.

Weights and pages are exact; context and NCCL are allowances, workspaces and graphs what steps hold
at once (step_memory.py). Where nobody says how many pages there are, they take what is left, so the
reserve is for what no line counts. An engine's start and jobs/plan.py share this page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kdray.cards import Card, card_found
from kdray.config import EngineConfig
from kdray.errors import ConfigError
from kdray.facts import EngineFacts, draft_ranks, page_bytes
from kdray.kernels.latent_rows import FP8, RowFormat
from kdray.model.config import ModelConfig
from kdray.model.dflash_config import DFlashConfig
from kdray.model.draft_int4 import mlp_form
from kdray.model.weight_bytes import drafter_bytes, table_bytes, target_bytes
from kdray.model.weights import experts_stay_packed
from kdray.step_memory import StepMemory

WEIGHTS = "target's weights"
GIB = 1 << 30
MIB = 1 << 20
CONTEXT_BYTES = 640 * MIB  # a CUDA context, cuBLAS with its workspace, our modules
NCCL_BYTES = 512 * MIB  # channels' buffers among eight ranks of a host
# Of a GPU: what torch rounds its blocks up by (2 MiB a large tensor), blocks that fit nothing for a
# while, a profiler's buffers, kernels loaded late. It grows with the number of tensors and with the
# allowances above, little with the card: 2 GiB, or 2 % of a large one.
RESERVE_BYTES, RESERVE = 2 * GIB, 0.02
HOST_RESERVE = 0.01  # of a rank's part of a host, which has its own ways to make room
SPARE_PAGES = 1  # beside the requests' own: where the padding rows of device rounds write


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a plan; `bytes` of a part of another line do not count again."""

    name: str
    bytes: int
    is_part: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """One rank's. Bytes of a page count the target's and its part of the drafter's KV; numbers of
    pages are of those that requests get.

    num_pages   that the engine means to take; None: not said
    by_format   bytes of a page by the format of the target's rows, as --kv-dtype names them
    """

    rank: int
    ranks: int
    card: Card
    items: tuple[Item, ...]
    page_size: int
    page_bytes: int
    by_format: Mapping[str, int]
    num_pages: int | None

    @property
    def weights(self) -> int:
        """Bytes of the target's weights."""
        return next(item.bytes for item in self.items if item.name == WEIGHTS)

    @property
    def fixed(self) -> int:
        """Bytes of everything but pages."""
        return sum(item.bytes for item in self.items if not item.is_part)

    @property
    def room(self) -> int:
        """Bytes left for pages; below 0 where there are too few."""
        return self.card.total - self.fixed

    @property
    def pages(self) -> int:
        return self._pages_of(self.page_bytes)

    @property
    def fits(self) -> bool:
        return self.pages >= (1 if self.num_pages is None else self.num_pages)

    def text(self) -> str:
        """A table, a line an item."""
        head = f"memory of rank {self.rank} of {self.ranks} on {self.card.name}, GiB"
        lines = [f"{head:<62}{self.card.total / GIB:8.2f}"]
        for item in self.items:
            lead = "      " if item.is_part else "  "
            lines.append(f"{lead + item.name:<62}{item.bytes / GIB:8.2f}")
        lines.append(f"{'  left for KV pages':<62}{self.room / GIB:8.2f}")
        if self.num_pages is not None:
            taken = f"  KV pages: {self.num_pages:,} of {self.page_size} tokens, and a spare one"
            lines.append(f"{taken:<62}{self._bytes_of(self.num_pages) / GIB:8.2f}")
        rooms = (
            f"{self._pages_of(size) * self.page_size:,} in {name}"
            for name, size in self.by_format.items()
        )
        lines.append(f"  room for so many tokens of KV: {', '.join(rooms)}")
        return "\n".join(lines)

    def refusal(self) -> str | None:
        """Why it cannot be, with figures, on one line; or None."""
        if self.fits:
            return None
        pages = 1 if self.num_pages is None else self.num_pages
        return (
            f"rank {self.rank} of {self.ranks} does not fit on {self.card.name}: it needs "
            f"{(self.fixed + self._bytes_of(pages)) / GIB:.1f} GiB of "
            f"{self.card.total / GIB:.1f} ({self.weights / GIB:.1f} of weights, "
            f"{(self.fixed - self.weights) / GIB:.1f} beside them, "
            f"{self._bytes_of(pages) / GIB:.2f} of KV pages)"
        )

    def check(self) -> None:
        """ConfigError where it cannot be."""
        if (why := self.refusal()) is not None:
            raise ConfigError(f"{why}; {self._advice()}")

    def _advice(self) -> str:
        if self.pages:
            return f"--num-pages {self.pages} (num_pages, of {self.page_size} tokens) would fit"
        return "use a larger tp, or cards with more memory"

    def _pages_of(self, size: int) -> int:
        """Of `size` bytes, that fit beside the spare one."""
        return max(0, self.room // size - SPARE_PAGES)

    def _bytes_of(self, pages: int) -> int:
        return (pages + SPARE_PAGES) * self.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a plan is made from: an engine's wishes and its models' shapes.

    kv_row      of the target's cache
    packed      routed experts stay INT4
    on_gpu      of the ranks: what a CPU has not, it needs no room for
    num_pages   None: whatever fits
    """

    config: EngineConfig
    model: ModelConfig
    drafter: DFlashConfig | None
    dtype: torch.dtype
    kv_row: RowFormat
    packed: bool
    on_gpu: bool
    num_pages: int | None = None

    def plan(self, rank: int, card: Card) -> MemoryPlan:
        """Of one rank on its card."""
        drafter = self._own_drafter(rank)
        return MemoryPlan(
            rank=rank,
            ranks=self.config.tp,
            card=card,
            items=(*self._weights(drafter), *self._beside(drafter, card)),
            page_size=self.config.page_size,
            page_bytes=self._page_bytes(drafter, self.kv_row),
            by_format={
                _name(kept_as): self._page_bytes(drafter, self._row(kept_as))
                for kept_as in dict.fromkeys((self.dtype, FP8))
            },
            num_pages=self.num_pages,
        )

    def page_bytes(self, rank: int) -> int:
        """Of a page of that rank."""
        return self._page_bytes(self._own_drafter(rank), self.kv_row)

    def plans(self, card: Card) -> list[MemoryPlan]:
        """Of the ranks that differ: the first, and any other where the first drafts alone."""
        drafts_alone = self.drafter is not None and draft_ranks(self.config, self.drafter) == 1
        kinds = 2 if drafts_alone and self.config.tp > 1 else 1
        return [self.plan(rank, card) for rank in range(kinds)]

    def _own_drafter(self, rank: int) -> DFlashConfig | None:
        """The rank's part of it."""
        sharing = draft_ranks(self.config, self.drafter)
        return self.drafter.of_rank(sharing) if self.drafter and rank < sharing else None

    def _weights(self, drafter: DFlashConfig | None) -> list[Item]:
        ranks = self.config.tp
        router = torch.bfloat16 if self.on_gpu and self.dtype == torch.bfloat16 else torch.float32
        target = target_bytes(
            self.model, ranks, self.dtype, packed=self.packed, router_dtype=router
        )
        form = "INT4 with bf16 scales" if self.packed else _name(self.dtype)
        items = [
            Item(WEIGHTS, target.total),
            Item(f"routed experts, {form}", target.experts, is_part=True),
            Item(f"split over {ranks} ranks, {_name(self.dtype)}", target.split, is_part=True),
            Item(f"whole on every rank, {_name(self.dtype)}", target.whole, is_part=True),
            Item(f"routers, {_name(router)}", target.routers, is_part=True),
        ]
        if drafter is not None:
            items += self._drafter(drafter)
            if drafter.ranks < ranks:
                tables = table_bytes(self.model, self.dtype)
                items.append(Item("target's embedding and head, whole, for the drafter", tables))
        return items

    def _drafter(self, drafter: DFlashConfig) -> list[Item]:
        device = torch.device("cuda" if self.on_gpu else "cpu")
        form = mlp_form(self.config.draft_weights, self.dtype, device)
        weights = drafter_bytes(drafter, self.dtype, form)
        packed = "INT4 with bf16 scales" if form == "packed" else _name(self.dtype)
        return [
            Item("drafter's weights", weights.total),
            Item(f"its MLPs, {packed}", weights.mlps, is_part=True),
        ]

    def _beside(self, drafter: DFlashConfig | None, card: Card) -> list[Item]:
        context = max(CONTEXT_BYTES if self.on_gpu else 0, card.taken)
        steps = self._steps(drafter)
        items = [
            Item("context, libraries, and what others took", context),
            Item("workspaces", steps.workspaces),
        ]
        if self.on_gpu and self.config.tp > 1:
            items.append(Item("NCCL", NCCL_BYTES))
        if self.on_gpu and self.config.graphs:
            items.append(Item("CUDA graphs", steps.graphs))
        items.append(Item("reserve, for what is not counted", self._reserve(card)))
        return items

    def _steps(self, drafter: DFlashConfig | None) -> StepMemory:
        return StepMemory(
            config=self.config,
            model=self.model,
            drafter=drafter,
            dtype=self.dtype,
            packed=self.packed,
            on_gpu=self.on_gpu,
        )

    def _reserve(self, card: Card) -> int:
        if not self.on_gpu:
            return round(HOST_RESERVE * card.total)
        return max(RESERVE_BYTES, round(RESERVE * card.total))

    def _row(self, kept_as: torch.dtype) -> RowFormat:
        return RowFormat.of(self.model.kv_lora_rank, self.model.qk_rope_head_dim, kept_as)

    def _page_bytes(self, drafter: DFlashConfig | None, row: RowFormat) -> int:
        return page_bytes(
            self.model,
            drafter,
            page_size=self.config.page_size,
            row=row,
            dtype=self.dtype,
            device=torch.device("cuda" if self.on_gpu else "cpu"),
        )


def planned_start(config: EngineConfig, facts: EngineFacts) -> Planned:
    """What the plans of an engine's ranks are made from."""
    return Planned(
        config=config,
        model=facts.model,
        drafter=facts.draft_config(),
        dtype=facts.dtype,
        kv_row=facts.kv_row,
        packed=experts_stay_packed(facts.model, facts.dtype, facts.device),
        on_gpu=facts.device.type == "cuda",
        num_pages=None if facts.pages_by_room else facts.num_pages,
    )


def plan_of_start(config: EngineConfig, facts: EngineFacts, rank: int) -> MemoryPlan:
    """What an engine's rank is about to take on the device that it has."""
    return planned_start(config, facts).plan(rank, card_found(facts.device, config.tp))


def fitting_ranks(planned: Sequence[Planned], card: Card) -> int | None:
    """The fewest ranks of those planned whose plans all fit."""
    fitting = (p.config.tp for p in planned if all(plan.fits for plan in p.plans(card)))
    return min(fitting, default=None)


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32", FP8: "fp8"}[dtype]
