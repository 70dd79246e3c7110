"""The rows of a plain pass: parts of texts, laid out for a target from nothing but their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kdray.kernels.attention_batch import AttentionBatch, DeviceAttentionBatch
from kdray.kernels.ops import LiveRows
from kdray.model.batch import ForwardBatch

PAGE = 16  # the pages of a text follow one another


class Part(NamedTuple):
    """A text's rows in a pass: known tokens, then nodes 1 .. by parent; mine: the text's own."""

    num_cached: int
    token: list[int]
    parents: list[int]
    mine: list[int]

    @property
    def num_known(self) -> int:
        return len(self.token) - len(self.parents)


def chunk(text: Sequence[int], start: int, end: int) -> Part:
    """Tokens as of a prompt."""
    return Part(start, list(text[start:end]), [], list(range(end - start)))


def tree(text: Sequence[int], start: int) -> Part:
    """A root, then a node for every token behind it, each with a wrong sibling in front."""
    token, parents, mine = [text[start]], [], [0]
    for own in text[start + 1 :]:
        parents += [mine[-1]] * 2
        token += [own - 1 if own else 1, own]
        mine.append(len(token) - 1)
    return Part(start, token, parents, mine)


def step_rows(parts: Sequence[Part], pages: int, device: torch.device) -> ForwardBatch:
    """As a step from the host lays them out; every text has `pages` pages."""
    attention = AttentionBatch(
        row_start=tuple(accumulate((len(part.token) for part in parts), initial=0)),
        num_cached=tuple(part.num_cached for part in parts),
        num_known=tuple(part.num_known for part in parts),
        page_table=_page_table(len(parts), pages).to(device),
        page_size=PAGE,
        mask=_masks(parts, 1 + max(len(part.parents) for part in parts)).to(device),
    )
    return _flat(parts, pages, attention, None, device)


def round_rows(parts: Sequence[Part], pages: int, device: torch.device) -> ForwardBatch:
    """As a device round lays them out: a known token each, padded to the most nodes."""
    nodes = max(len(part.token) for part in parts)
    num_nodes = torch.tensor([len(part.token) for part in parts], dtype=torch.int32, device=device)
    attention = DeviceAttentionBatch(
        num_cached=torch.tensor(
            [part.num_cached for part in parts], dtype=torch.int32, device=device
        ),
        num_nodes=num_nodes,
        page_table=_page_table(len(parts), pages).to(device),
        page_size=PAGE,
        mask=_masks(parts, nodes).to(device),
    )
    slot = torch.arange(len(parts), dtype=torch.int32, device=device)
    live = LiveRows(slot=slot, num_nodes=num_nodes, nodes=nodes)
    padded = [
        part._replace(
            token=part.token + [0] * (nodes - len(part.token)),
            parents=part.parents + [0] * (nodes - len(part.token)),
        )
        for part in parts
    ]
    return _flat(padded, pages, attention, live, device)


def _flat(
    parts: Sequence[Part],
    pages: int,
    attention: AttentionBatch | DeviceAttentionBatch,
    live: LiveRows | None,
    device: torch.device,
) -> ForwardBatch:
    position = [
        [*range(part.num_known), *(part.num_known - 1 + d for d in _depths(part.parents))]
        for part in parts
    ]
    columns = (
        [token for part in parts for token in part.token],
        [part.num_cached + p for part, own in zip(parts, position, strict=True) for p in own],
        [
            r * pages * PAGE + part.num_cached + i
            for r, part in enumerate(parts)
            for i in range(len(part.token))
        ],
    )
    token, place, slot = (torch.tensor(column, device=device) for column in columns)
    return ForwardBatch(token=token, position=place, slot=slot, attention=attention, live=live)


def _page_table(texts: int, pages: int) -> torch.Tensor:
    return torch.arange(texts * pages, dtype=torch.int32).view(texts, pages)


def _depths(parents: Sequence[int]) -> list[int]:
    """Of nodes 1 .. ."""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    return depth[1:]


def _masks(parts: Sequence[Part], nodes: int) -> torch.Tensor:
    """[R, N, W]: every node sees itself and who is above it."""
    words: NDArray[np.uint32] = np.zeros((len(parts), nodes, -(-nodes // 32)), dtype=np.uint32)
    for r, part in enumerate(parts):
        above: list[list[int]] = [[0]]
        for node, parent in enumerate(part.parents, start=1):
            above.append([*above[parent], node])
        for node, path in enumerate(above):
            for other in path:
                words[r, node, other // 32] |= np.uint32(1 << other % 32)
    return torch.from_numpy(words.view(np.int32))
