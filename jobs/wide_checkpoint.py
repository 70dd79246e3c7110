"""A checkpoint in Kimi K2.6's layout that is written at the speed of memory and routes decisively.

Large tensors are runs of pools of random numbers, each from a place drawn anew, so writing costs a
copy. Some tokens are in play: prompts are of these alone, and the head gives them the largest
logits, so that outputs are of these too, and a drafter without a clue still guesses some.
The router of each layer gives each token in play experts of its own, every expert as many tokens as
any other, far ahead of the rest: with random routers the eighth and the ninth of 384 experts lie so
close that rounding to bf16 swaps them in one row of ten, and nothing could be said of what follows.
"""

from __future__ import annotations

import argparse
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_checkpoint import (
    CHUNK,
    PREFIX,
    Draw,
    Generator,
    Planned,
    bf16,
    normal,
    write_drafter,
    write_target,
)
from torch import Tensor

from kdray.model.stored import ITEM_BYTES

POOLED_FROM = 1 << 16  # numbers of a tensor
POOL = CHUNK + CHUNK // 4
IN_PLAY = 48
LOUDNESS = 4.0  # standard deviation of the logits of tokens in play; of others it is 1
OWN_LOGIT = 8.0  # of a token's own experts, where the residual stream is still its embedding
OTHER_LOGIT = 0.5  # standard deviation
DRAFT_LOUDNESS = 0.25  # of the drafter's: a flat guess makes wide trees


def tokens_in_play(vocab_size: int) -> list[int]:
    """Spread over the vocabulary, so that every rank's part has some."""
    count = min(IN_PLAY, vocab_size // 2)
    return [1 + i * vocab_size // count for i in range(count)]


def write(folder: Path, fields: Mapping[str, Any], options: argparse.Namespace) -> None:
    """folder/target and folder/drafter; options as make_checkpoint's."""
    text = fields["text_config"]
    numbers = Numbers(
        seed=options.seed,
        vocab_size=text["vocab_size"],
        width=text["hidden_size"],
        top_k=text["num_experts_per_tok"],
    )
    write_target(folder / "target", fields, options, numbers.of_target)
    write_drafter(folder / "drafter", text, options, numbers.of_drafter)


def bytes_of(fields: Mapping[str, Any]) -> int:
    """Of the target: experts and vocabulary, which are nearly all of it at full width."""
    text = fields["text_config"]
    layers = text["num_hidden_layers"] - text["first_k_dense_replace"]
    weights = 3 * text["hidden_size"] * text["moe_intermediate_size"] * text["n_routed_experts"]
    # Half a byte, and two for the scale of 32; then whole numbers of two, and a GB a layer beside.
    experts = layers * weights * 9 // 16
    tables = 2 * 2 * text["vocab_size"] * text["hidden_size"]
    return int(experts + tables + text["num_hidden_layers"] * 10**9)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Draws what the tensors of a checkpoint hold, for any number of threads."""

    seed: int
    vocab_size: int
    width: int
    top_k: int
    _pools: dict[tuple[str, int], memoryview] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of_target(self, tensor: Planned) -> Planned:
        name = tensor.name.removeprefix(PREFIX)
        if name == "model.embed_tokens.weight":
            return self._with_rows(tensor, self._embeddings())
        if name == "lm_head.weight":
            loud = self._rows(name, LOUDNESS * self.width**-0.5)
            return self._with_rows(tensor, loud)
        if name.endswith("mlp.gate.weight"):
            return self._with_rows(tensor, self._router(name, tensor.shape[0]))
        return self._pooled(tensor)

    def of_drafter(self, tensor: Planned) -> Planned:
        if tensor.name == "norm.weight":
            scaled = bf16(np.full(tensor.size, DRAFT_LOUDNESS, dtype=np.float32))
            return replace(tensor, draw=lambda _, count: scaled)
        return self._pooled(tensor)

    def _embeddings(self) -> dict[int, Tensor]:
        return self._rows("embeddings", 1.0)

    def _rows(self, name: str, spread: float) -> dict[int, Tensor]:
        """[E] bf16 of every token in play."""
        generator, tokens = self._generator(name), tokens_in_play(self.vocab_size)
        rows = torch.from_numpy(normal(generator, len(tokens) * self.width, spread))
        return dict(zip(tokens, rows.view(len(tokens), -1).bfloat16(), strict=True))

    def _router(self, name: str, experts: int) -> dict[int, Tensor]:
        """Every expert's row: a little of everything, and the embeddings of its own tokens."""
        generator = self._generator(name)
        spread = OTHER_LOGIT * self.width**-0.5
        weight = torch.from_numpy(normal(generator, experts * self.width, spread))
        weight = weight.view(experts, self.width)
        embeddings = self._embeddings()
        groups = experts // self.top_k  # of experts that serve the same tokens
        orders = [
            generator.permutation(experts)[: groups * self.top_k].reshape(groups, -1)
            for _ in range(-(-len(embeddings) // groups))
        ]
        own = np.concatenate(orders)[: len(embeddings)]
        for chosen, row in zip(own, embeddings.values(), strict=True):
            weight[torch.from_numpy(chosen)] += row.float() * (OWN_LOGIT / self.width)
        return dict(enumerate(weight.bfloat16()))

    def _with_rows(self, tensor: Planned, rows: Mapping[int, Tensor]) -> Planned:
        return replace(tensor, draw=WithRows(self._pooled(tensor).draw, rows))

    def _pooled(self, tensor: Planned) -> Planned:
        if tensor.size < POOLED_FROM:
            return tensor
        item = ITEM_BYTES[tensor.dtype]

        def draw(generator: Generator, count: int) -> memoryview:
            pool = self._pool(tensor)
            first = int(generator.integers(0, POOL - count, endpoint=True))
            return pool[first * item : (first + count) * item]

        return replace(tensor, draw=draw)

    def _pool(self, tensor: Planned) -> memoryview:
        """Numbers for all tensors of the same kind."""
        kind = ".".join(tensor.name.rsplit(".", 2)[-2:]), tensor.shape[-1]
        with self._lock:
            if kind not in self._pools:
                drawn = tensor.draw(self._generator(f"{kind}"), POOL)
                self._pools[kind] = memoryview(drawn)
            return self._pools[kind]

    def _generator(self, name: str) -> Generator:
        return Generator(np.random.SFC64([self.seed, zlib.crc32(name.encode())]))


class WithRows:
    """Draws a bf16 matrix, in order, some of whose rows are given."""

    def __init__(self, draw: Draw, rows: Mapping[int, Tensor]) -> None:
        self._draw = draw
        self._rows = rows
        self._done = 0

    def __call__(self, generator: Generator, count: int) -> bytes | memoryview:
        drawn, first = self._draw(generator, count), self._done
        self._done += count
        near = [
            (begin, row)
            for number, row in self._rows.items()
            if -row.numel() < (begin := number * row.numel() - first) < count
        ]
        if not near:
            return drawn
        changed = np.frombuffer(drawn, dtype=np.int16).copy()
        for begin, row in near:
            end = min(begin + row.numel(), count)
            changed[max(begin, 0) : end] = row.view(torch.int16).numpy()[
                max(-begin, 0) : end - begin
            ]
        return changed.tobytes()
