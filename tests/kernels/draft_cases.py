"""Batches for draft_attention and what it must give in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kdray.kernels.attention_batch import DraftAttentionBatch


@dataclass(frozen=True, slots=True)
class Heads:
    """S slots of a block, H query heads, G key heads, D numbers each."""

    slots: int
    heads: int
    groups: int
    dim: int


KIMI = Heads(slots=8, heads=32, groups=8, dim=128)
DEMO = Heads(slots=8, heads=4, groups=2, dim=64)
RULES: dict[str, tuple[bool, int | None]] = {
    "all": (False, None),
    "causal": (True, None),
    "short window": (True, 3),
    "window that looks ahead": (False, 5),
    "window": (True, 70),
    "window of all": (False, 100_000),
}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    query: Tensor
    own: Tensor
    cache: Tensor
    batch: DraftAttentionBatch

    @property
    def scale(self) -> float:
        return float(self.query.shape[3] ** -0.5)

    def to(self, device: str) -> Case:
        end, table = self.batch.end.to(device), self.batch.page_table.to(device)
        return Case(
            self.query.to(device),
            self.own.to(device),
            self.cache.to(device),
            replace(self.batch, end=end, page_table=table),
        )


def make_case(
    ends: Sequence[int],
    heads: Heads,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    rule: str = "all",
    size: float = 1.0,
    seed: int = 0,
) -> Case:
    """Pages dealt out at random; what no request has written is NaN, and a page table's entries
    behind the context point nowhere. size: of the queries' numbers, which makes scores peaky."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-end // page_size) for end in ends]
    order = torch.randperm(sum(pages) + 3, generator=generator).int()
    table = torch.full((len(ends), max(pages, default=0) + 1), 2**30, dtype=torch.int32)
    for r, own in enumerate(order[: sum(pages)].split(pages)):
        table[r, : len(own)] = own
    causal, window = RULES[rule]
    batch = DraftAttentionBatch(
        end=torch.tensor(list(ends), dtype=torch.int32),
        page_table=table,
        page_size=page_size,
        causal=causal,
        window=window,
    )
    kv = (2, heads.groups, heads.dim)
    cache = torch.full((len(order) * page_size, *kv), torch.nan, dtype=dtype)
    for r, end in enumerate(ends):
        cache[slots(batch, r, end)] = torch.randn(end, *kv, generator=generator).to(dtype)
    shape = (len(ends), heads.slots, heads.heads, heads.dim)
    query = (size * torch.randn(shape, generator=generator)).to(dtype)
    own = torch.randn(len(ends), heads.slots, *kv, generator=generator).to(dtype)
    return Case(query, own, cache, batch)


def slots(batch: DraftAttentionBatch, r: int, count: int) -> Tensor:
    """Where the first positions of a request lie."""
    position = torch.arange(count, device=batch.page_table.device)
    pages = batch.page_table[r].long()[position // batch.page_size]
    return pages * batch.page_size + position % batch.page_size


def expected(case: Case) -> Tensor:
    """[R, S, H, D] float64, request by request, written from the batch's docstring."""
    batch, (_, size, heads, _), groups = case.batch, case.query.shape, case.own.shape[3]
    out = torch.zeros(case.query.shape, dtype=torch.float64, device=case.query.device)
    for r, end in enumerate(batch.end.tolist()):
        context = case.cache[slots(batch, r, end)]
        key, value = torch.cat([context, case.own[r]]).double().unbind(1)  # [C + S, G, D]
        key, value = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
        scores = torch.einsum("shd,khd->hsk", case.query[r].double(), key) * case.scale
        hidden = ~seen(batch, end, size).to(scores.device)
        weight = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[r] = torch.einsum("hsk,khd->shd", weight, value)
    return out


def seen(batch: DraftAttentionBatch, end: int, size: int) -> Tensor:
    """[S, end + S]: which positions each slot sees."""
    key, query = torch.arange(end + size), end + torch.arange(size)[:, None]
    sees = torch.ones(size, end + size, dtype=torch.bool)
    if batch.causal:
        sees &= key <= query
    if batch.window is not None:
        sees &= (query - key).abs() < batch.window
    return sees
