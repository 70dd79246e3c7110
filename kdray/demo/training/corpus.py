"""Documents made, encoded and packed into rows by many processes."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kdray.demo.text import Document, sample_document
from kdray.demo.tokenizer import DemoTokenizer
from kdray.demo.training.shapes import seed_of

ROW = 512
OPEN_ROWS = 8
"""A document goes to the first of this many open rows with room for it."""


@dataclass(frozen=True)
class PackedCorpus:
    """Rows of whole documents.

    tokens int16 [N, ROW]; segment uint8 [N, ROW], the document's number in its row, 0 for padding;
    learnt bool [N, ROW], whether the token is part of an answer.
    """

    tokens: Tensor
    segment: Tensor
    learnt: Tensor

    def to(self, device: torch.device) -> PackedCorpus:
        """The same rows on another device."""
        return PackedCorpus(self.tokens.to(device), self.segment.to(device), self.learnt.to(device))


@dataclass(frozen=True)
class _Share:
    tokenizer: DemoTokenizer
    seed: int
    documents: int


def documents_of(seed: int, count: int) -> Iterator[Document]:
    """``count`` documents of one seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield sample_document(rng)


def pack_corpus(
    tokenizer: DemoTokenizer, seed: int, documents: int, processes: int
) -> PackedCorpus:
    """Pack ``documents`` documents; the result depends on ``processes`` but not on their timing."""
    shares = [
        _Share(
            DemoTokenizer(tokenizer.base), seed_of(seed, f"corpus {index}"), documents // processes
        )
        for index in range(processes)
    ]
    if processes == 1:
        parts = [_pack_share(shares[0])]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            parts = list(pool.map(_pack_share, shares))
    tokens, segment, learnt = (
        torch.from_numpy(np.concatenate([part[i] for part in parts])) for i in range(3)
    )
    return PackedCorpus(tokens, segment, learnt.bool())


def _pack_share(share: _Share) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows: list[tuple[list[int], list[int], list[int]]] = []
    opened: list[tuple[list[int], list[int], list[int]]] = []
    for document in documents_of(share.seed, share.documents):
        ids, learnt = share.tokenizer.encode_turns(document.turns)
        row = next((row for row in opened if len(row[0]) + len(ids) <= ROW), None)
        if row is None:
            if len(opened) == OPEN_ROWS:
                fullest = max(range(OPEN_ROWS), key=lambda i: len(opened[i][0]))
                rows.append(opened.pop(fullest))
            row = ([], [], [])
            opened.append(row)
        number = row[1][-1] + 1 if row[1] else 1
        row[0].extend(ids)
        row[1].extend([number] * len(ids))
        row[2].extend(learnt)
    return _as_arrays(rows + opened)


def _as_arrays(
    rows: list[tuple[list[int], list[int], list[int]]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.zeros((len(rows), ROW), np.int16)
    segment = np.zeros((len(rows), ROW), np.uint8)
    learnt = np.zeros((len(rows), ROW), np.uint8)
    for index, (row_tokens, row_segment, row_learnt) in enumerate(rows):
        used = len(row_tokens)
        tokens[index, :used] = row_tokens
        segment[index, :used] = row_segment
        learnt[index, :used] = row_learnt
    return tokens, segment, learnt
