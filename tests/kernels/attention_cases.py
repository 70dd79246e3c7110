"""Batches for verify_attention and what it must give in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.tree import ancestor_mask
from kdray.kernels.attention_batch import AttentionBatch
from kdray.kernels.attention_rows import AttentionRows
from kdray.kernels.latent_rows import dequantised, quantised

CHAIN, BUSHY, STAR = "chain", "bushy", "star"


@dataclass(frozen=True, slots=True)
class Part:
    """One request: cached tokens, known tokens (0: it takes no part), nodes of its tree (root
    counted) and their shape, rows of padding behind."""

    cached: int
    known: int = 1
    nodes: int = 1
    shape: str = BUSHY
    padding: int = 0

    @property
    def rows(self) -> int:
        return self.known + self.nodes - 1 if self.known else 0

    def parents(self) -> list[int]:
        if self.shape == CHAIN:
            return list(range(-1, self.nodes - 1))
        if self.shape == STAR:
            return [-1] + [0] * (self.nodes - 1)
        rng = np.random.default_rng(self.nodes + 7 * self.cached)
        return [-1] + [int(rng.integers(0, i)) for i in range(1, self.nodes)]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    query: Tensor
    cache: Tensor
    batch: AttentionBatch
    parts: tuple[Part, ...]

    @property
    def num_rows(self) -> int:
        return self.query.shape[0]

    def rows(self, device: torch.device | str = "cpu") -> AttentionRows:
        """With padding and requests that take no part, which an AttentionBatch cannot say."""

        def tensor(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(list(numbers), dtype=torch.int32, device=device)

        return AttentionRows(
            row_start=tensor(self.batch.row_start),
            num_cached=tensor(self.batch.num_cached),
            num_known=tensor(self.batch.num_known),
            num_nodes=tensor([part.nodes for part in self.parts]),
            page_table=self.batch.page_table.to(device),
            page_size=self.batch.page_size,
            mask=self.batch.mask.to(device),
            rows_cap=max(part.rows + part.padding for part in self.parts),
        )


def make_case(
    parts: Sequence[Part],
    *,
    heads: int,
    latent: int,
    rope: int,
    page_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    size: float = 1.0,
) -> Case:
    """Pages dealt out at random, what no request has written is NaN; the page table's padding
    points nowhere. size: of the queries' numbers, which makes scores peaky."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-(part.cached + part.rows) // page_size) for part in parts]
    order = torch.randperm(sum(pages) + 3, generator=generator).int()
    table = torch.full((len(parts), max(pages) + 1), -1, dtype=torch.int32)
    taken = 0
    for r, count in enumerate(pages):
        table[r, :count] = order[taken : taken + count]
        taken += count
    rows = [part.rows + part.padding for part in parts]
    batch = AttentionBatch(
        row_start=tuple(int(n) for n in np.cumsum([0, *rows])),
        num_cached=tuple(part.cached for part in parts),
        num_known=tuple(part.known for part in parts),
        page_table=table,
        page_size=page_size,
        mask=_mask(parts),
    )
    cache = torch.full((len(order) * page_size, latent + rope), torch.nan, dtype=dtype)
    for r, part in enumerate(parts):
        written = slots(batch, r, part.cached + part.rows)
        cache[written] = torch.randn(len(written), latent + rope, generator=generator).to(dtype)
    shape = (batch.row_start[-1], heads, latent + rope)
    query = (size * torch.randn(shape, generator=generator)).to(dtype)
    return Case(query=query, cache=cache, batch=batch, parts=tuple(parts))


def slots(batch: AttentionBatch, r: int, count: int) -> Tensor:
    """Where the first positions of a request lie."""
    position = torch.arange(count)
    pages = batch.page_table[r].long()[position // batch.page_size]
    return pages * batch.page_size + position % batch.page_size


def _mask(parts: Sequence[Part]) -> Tensor:
    nodes = max(part.nodes for part in parts)
    mask = np.zeros((len(parts), nodes, -(-nodes // 32)), dtype=np.uint32)
    for r, part in enumerate(parts):
        words = ancestor_mask(part.parents())
        mask[r, : len(words), : words.shape[1]] = words
    return torch.from_numpy(mask.view(np.int32))


def seen(part: Part) -> NDArray[np.bool_]:
    """[rows, cached + rows]: written from AttentionBatch's docstring, node by node."""
    root = part.cached + part.known - 1
    parents = part.parents()
    sees = np.zeros((part.rows, part.cached + part.rows), dtype=bool)
    for row in range(part.rows):
        if row < part.known:
            sees[row, : part.cached + row + 1] = True
            continue
        sees[row, : root + 1] = True
        node = row - part.known + 1
        while node > 0:
            sees[row, root + node] = True
            node = parents[node]
    return sees


def expected(case: Case, scale: float, latent: int) -> Tensor:
    """[T, H, C] float64, on the query's device; padding gives 0."""
    query, device = case.query.double(), case.query.device
    out = torch.zeros(*query.shape[:2], latent, dtype=torch.float64, device=device)
    for r, part in enumerate(case.parts):
        start = case.batch.row_start[r]
        key = case.cache[slots(case.batch, r, part.cached + part.rows).to(device)].double()
        own = slice(start, start + part.rows)
        scores = torch.einsum("thd,sd->ths", query[own], key) * scale
        hidden = torch.from_numpy(~seen(part)).to(device)[:, None]
        weight = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[own] = torch.einsum("ths,sc->thc", weight, key[:, :latent])
    return out


def difference(out: Tensor, wanted: Tensor) -> float:
    """The largest difference of a row (one head) over its norm; NaN gives inf."""
    off = (out.double() - wanted).norm(dim=-1)
    relative = off / wanted.norm(dim=-1).clamp_min(1e-30)
    relative = torch.where(off == 0, torch.zeros_like(off), relative)
    return float(relative.nan_to_num(nan=torch.inf).max()) if relative.numel() else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class StoredCase:
    """The same batch over rows in fp8; case.cache is what the rows stand for, in float32."""

    case: Case
    rows: Tensor


def quantised_case(case: Case, latent: int) -> StoredCase:
    """What no request has written is bytes of NaN, scales and all."""
    cache, rope = case.cache, case.cache.shape[1] - latent
    rows = quantised(cache[:, :latent], cache[:, latent:])
    rows[cache.isnan().all(1)] = 0xFF
    return StoredCase(replace(case, cache=dequantised(rows, latent, rope)), rows)


def every_row_alone(case: Case, latent: int) -> Case:
    """The case's real rows as plain decoding has them: a request each, of one row, the keys that
    the row sees in the cache in the order of their positions; values are `latent` numbers wide.
    """
    heads, width = case.query.shape[1:]
    paths, queries = [], []
    for r, part in enumerate(case.parts):
        where = slots(case.batch, r, part.cached + part.rows)
        for row, sees in enumerate(seen(part)):
            paths.append(where[torch.from_numpy(sees)])
            queries.append(case.query[case.batch.row_start[r] + row])
    parts = [Part(len(path) - 1) for path in paths]
    alone = make_case(
        parts, heads=heads, latent=latent, rope=width - latent, page_size=case.batch.page_size,
        dtype=case.query.dtype, seed=1,
    )  # fmt: skip
    cache = alone.cache.to(case.cache.device)
    for r, path in enumerate(paths):
        to = slots(alone.batch, r, len(path)).to(cache.device)
        cache[to] = case.cache[path.to(cache.device)]
    return replace(alone, query=torch.stack(queries), cache=cache)


def real_rows(case: Case) -> Tensor:
    """[T] bool: those that are no padding."""
    real = torch.zeros(case.num_rows, dtype=torch.bool)
    for start, part in zip(case.batch.row_start, case.parts, strict=False):
        real[start : start + part.rows] = True
    return real
