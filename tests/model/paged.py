"""Drives a TargetModel over paged caches, one text at a time or several in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kdray.kernels.attention_batch import AttentionBatch
from kdray.kernels.latent_rows import FP8, RowFormat
from kdray.model.batch import ForwardBatch, TargetOutput
from kdray.model.target import TargetModel


@dataclass
class Text:
    """One request: its pages (scattered on purpose) and how much of it is cached."""

    pages: list[int]
    num_cached: int = 0


@dataclass(frozen=True)
class Part:
    """What one text runs in a step: known tokens, then draft nodes 1 .. by parent node."""

    text: Text
    known: Sequence[int]
    draft: Sequence[int] = ()
    parents: Sequence[int] = ()


@dataclass
class PagedRunner:
    """Caches start out as NaN, so that reading an unwritten slot shows."""

    model: TargetModel
    page_size: int = 16
    num_pages: int = 64
    caches: list[Tensor] = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.num_pages * self.page_size, self.model.kv_width)
        self.caches = [torch.full(shape, torch.nan) for _ in range(self.model.num_layers)]
        order = np.random.default_rng(0).permutation(self.num_pages)
        self.free = [int(page) for page in order]

    def keep_in_fp8(self) -> None:
        """Caches of rows in fp8, all bytes of which are no numbers."""
        config = self.model.config
        row = RowFormat.of(config.kv_lora_rank, config.qk_rope_head_dim, FP8)
        shape = (self.num_pages * self.page_size, row.width)
        self.caches = [torch.full(shape, 0xFF, dtype=row.dtype) for _ in self.caches]

    def text(self, capacity: int) -> Text:
        return Text([self.free.pop() for _ in range(-(-capacity // self.page_size))])

    def run(self, *parts: Part) -> TargetOutput:
        """One step; afterwards the known tokens count as cached."""
        batch = make_batch(parts, self.page_size)
        with torch.inference_mode():
            output = self.model.forward(batch, self.caches)
        for part in parts:
            part.text.num_cached += len(part.known)
        return output

    def logits(self, *parts: Part) -> Tensor:
        with torch.inference_mode():
            return self.model.logits(self.run(*parts).hidden)


def make_batch(parts: Sequence[Part], page_size: int) -> ForwardBatch:
    attention = _attention(parts, page_size)
    token, position, slot = [], [], []
    for r, part in enumerate(parts):
        token += [*part.known, *part.draft]
        root = part.text.num_cached + len(part.known) - 1
        position += range(part.text.num_cached, root + 1)
        position += [root + depth for depth in _depths(part.parents)[1:]]
        rows = len(part.known) + len(part.draft)
        slot += attention.slots[r, part.text.num_cached : part.text.num_cached + rows].tolist()
    return ForwardBatch(
        token=torch.tensor(token),
        position=torch.tensor(position),
        slot=torch.tensor(slot),
        attention=attention,
    )


def _attention(parts: Sequence[Part], page_size: int) -> AttentionBatch:
    rows = [len(part.known) + len(part.draft) for part in parts]
    num_pages = max(len(part.text.pages) for part in parts)
    tables = [part.text.pages + [0] * (num_pages - len(part.text.pages)) for part in parts]
    return AttentionBatch(
        row_start=tuple(accumulate(rows, initial=0)),
        num_cached=tuple(part.text.num_cached for part in parts),
        num_known=tuple(len(part.known) for part in parts),
        page_table=torch.tensor(tables, dtype=torch.int32),
        page_size=page_size,
        mask=_mask_words([part.parents for part in parts]),
    )


def _depths(parents: Sequence[int]) -> list[int]:
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    return depth


def ancestors(parents: Sequence[int]) -> list[set[int]]:
    """Every node's path from the root, itself included; parents[i] is node i + 1's parent."""
    paths = [{0}]
    for node, parent in enumerate(parents, start=1):
        paths.append(paths[parent] | {node})
    return paths


def _mask_words(trees: Sequence[Sequence[int]]) -> Tensor:
    num_nodes = 1 + max(len(parents) for parents in trees)
    words = np.zeros((len(trees), num_nodes, -(-num_nodes // 32)), dtype=np.uint32)
    for r, parents in enumerate(trees):
        for node, path in enumerate(ancestors(parents)):
            for other in path:
                words[r, node, other // 32] |= np.uint32(1 << other % 32)
    return torch.from_numpy(words.view(np.int32))
