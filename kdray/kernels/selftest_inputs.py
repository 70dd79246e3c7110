"""What the self-test's cases run on: arrays of a model's own sizes, few rows of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kdray.core.plan import Candidates, DraftTrees, RunningRows
from kdray.kernels.latent_rows import RowFormat, dequantised, is_fp8
from kdray.kernels.moe_layout import TILE, Int4, PackedExperts
from kdray.kernels.ops import Ops, RoutingRule
from kdray.kernels.reference import ReferenceOps

REQUESTS, NODES, DEPTH, RANKS = 3, 9, 4, 4
CACHED = 37  # tokens of each request before its root


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSizes:
    """A drafter's attention: H heads, G key heads, head dim D, S slots a block."""

    heads: int
    groups: int
    dim: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One rank's, in the letters of ops.py.

    heads        of this rank          nope, value   widths of a head's key and value
    query_latent of all heads' queries; 0: they have none
    experts      0: the model has none; inner: intermediate size of one, on this rank
    packed       whether their weights are INT4
    """

    width: int
    heads: int
    nope: int
    value: int
    latent: int
    query_latent: int
    rope: int
    vocab: int
    experts: int
    inner: int
    rule: RoutingRule | None
    packed: bool
    dtype: torch.dtype
    kv_row: RowFormat
    page_size: int
    draft: DraftSizes | None


class Inputs:
    """Arrays of a model's sizes, drawn on the CPU by the name they are asked for."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.device = device
        generator = torch.Generator().manual_seed(11)
        pages = -(-(CACHED + NODES) // sizes.page_size)
        table = torch.randperm(REQUESTS * pages, generator=generator).view(REQUESTS, pages)
        self.page_table = table.int().to(device)
        self.num_slots = REQUESTS * pages * sizes.page_size
        self.trees = self._trees()

    def drawn(self, seed: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return numbers.to(self.device, dtype or self.sizes.dtype)

    def norm(self, width: int) -> SomeNorm:
        weight = 1 + 0.1 * self.drawn(1, width)
        self.settle()
        return SomeNorm(weight, torch.tensor(1e-5, device=self.device))

    def matrix(self, seed: int, inputs: int, outputs: int) -> Tensor:
        """[in, out] as weights lie on a GPU: an output's side by side."""
        by_output: Tensor = self.drawn(seed, outputs, inputs) * inputs**-0.5
        self.settle()
        return by_output.T

    @cached_property
    def written_experts(self) -> list[int]:
        """Those that rows may choose: the others' weights are never written, nor read."""
        sizes = self.sizes
        assert sizes.rule is not None
        used = min(sizes.experts, sizes.rule.top_k + 2)
        return [i * (sizes.experts - 1) // max(1, used - 1) for i in range(used)]

    @cached_property
    def experts(self) -> PackedExperts:
        width, inner = self.sizes.width, self.sizes.inner
        experts = PackedExperts.empty(self.sizes.experts, width, inner, self.device)
        for i, number in enumerate(self.written_experts):
            gate, up = (self._int4(3 * i + j, inner, width) for j in range(2))
            experts.put(number, gate, up, self._int4(3 * i + 2, width, inner))
        return experts

    def _int4(self, seed: int, outputs: int, inputs: int) -> Int4:
        generator = torch.Generator().manual_seed(seed)
        q = torch.randint(-8, 8, (outputs, inputs), generator=generator, dtype=torch.int8)
        scale = torch.rand(outputs, inputs // TILE, generator=generator) * inputs**-0.5 / 4
        return Int4(q.to(self.device), scale.bfloat16().to(self.device))

    def settle(self) -> None:
        """Kernels read weights before the launch in front has ended: those must lie there."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rows_placed(self, count: int) -> SomeRows:
        angle = torch.arange(count, device=self.device)[:, None] * torch.ones(
            self.sizes.rope // 2, device=self.device
        )
        slot = self.slots()[:, : count // REQUESTS].flatten()
        return SomeRows(torch.polar(torch.ones_like(angle), 0.1 * angle), slot)

    def slots(self) -> Tensor:
        """[REQUESTS, CACHED + NODES] int64: the slot of every place."""
        place = torch.arange(CACHED + NODES, device=self.device)
        page = self.page_table.long()[:, place // self.sizes.page_size]
        slots: Tensor = page * self.sizes.page_size + place % self.sizes.page_size
        return slots

    def cache(self, by: Ops) -> Tensor:
        """Every place written, as `by` writes; rows as far apart as on a GPU."""
        sizes, rows = self.sizes, REQUESTS * (CACHED + NODES)
        wide = sizes.kv_row.width + 16 // sizes.kv_row.dtype.itemsize
        if sizes.kv_row.dtype == torch.uint8:
            wide = sizes.kv_row.width
        shape = (self.num_slots, wide)
        cache = torch.zeros(shape, dtype=sizes.kv_row.dtype, device=self.device)
        cache = cache[:, : sizes.kv_row.width]
        query = self.drawn(2, rows, sizes.heads, sizes.nope + sizes.rope)
        kv = self.drawn(3, rows, sizes.latent + sizes.rope)
        by.rope_cache(query, kv, cache, self.rows_placed(rows), self.norm(sizes.latent))
        return cache

    def known(self, cache: Tensor) -> Tensor:
        """A cache's numbers, whatever it keeps them as."""
        if is_fp8(cache):
            return dequantised(cache, self.sizes.latent, self.sizes.rope)
        return cache

    def candidates(self) -> Candidates:
        score = -torch.arange(1, RANKS + 1, dtype=torch.int32) * 300_000
        depth = torch.arange(1, DEPTH + 1, dtype=torch.int32)[:, None] * 7_001
        request = torch.arange(REQUESTS, dtype=torch.int32)[:, None, None] * 90_007
        scores = (score - depth - request).to(self.device)
        token = torch.arange(scores.numel(), dtype=torch.int32, device=self.device)
        return Candidates(token=token.view(scores.shape) % self.sizes.vocab, score=scores)

    def roots(self) -> Tensor:
        return torch.arange(5, 5 + REQUESTS, dtype=torch.int32, device=self.device)

    def _trees(self) -> DraftTrees:
        reference = ReferenceOps(self.device)
        return reference.build_trees(self.candidates(), self.roots(), [NODES - 1, 3, 0])

    def targets(self) -> Tensor:
        """Each node's first child, where it has one: a path to a leaf."""
        target = torch.zeros_like(self.trees.token)
        parent, token = self.trees.parent.cpu(), self.trees.token
        for r, count in enumerate(self.trees.num_nodes.tolist()):
            for node in range(count - 1, 0, -1):
                target[r, parent[r, node]] = token[r, node]
        return target

    def running(self) -> RunningRows:
        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((REQUESTS,), value, dtype=dtype, device=self.device)

        return RunningRows(
            slot=torch.arange(REQUESTS, dtype=torch.int32, device=self.device),
            root=self.roots(),
            root_position=full(CACHED, torch.int32),
            page_table=self.page_table,
            page_size=self.sizes.page_size,
            temperature=full(0.8, torch.float32),
            top_k=full(40, torch.int32),
            top_p=full(0.95, torch.float64),
            min_p=full(0.0, torch.float64),
            seed=full(7, torch.int64),
        )


class SomeNorm(NamedTuple):
    weight: Tensor
    eps: Tensor


class SomeRows(NamedTuple):
    turns: Tensor
    slot: Tensor
