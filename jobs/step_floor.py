"""The least a step can take: every weight and every cached row read once, every product done.

Of each kind of work the longer of bytes at copy speed and flops at matmul speed counts, and kinds
follow one another, as they do in a layer. Rows between the ops are left out (they stay in L2), and
so is what collectives take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from bench_verify_attention import matmul_flops_per_us
from gpu_timing import copy_bytes_per_us
from step_rank import Rank
from torch import Tensor

from kdray.model.dflash_weights import weight_shapes
from kdray.model.draft_int4 import mlp_form
from kdray.model.mla import LatentAttention
from kdray.model.moe import DenseMLP, MoE, PackedMoE
from kdray.model.target import TargetModel
from kdray.model.target_tables import TargetTables
from kdray.model.weight_bytes import drafter_bytes
from kdray.verifier.kv_cache import KVCache

US_PER_MS = 1e3


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a GPU does at best: bytes read and written by a large copy, flops of a bf16 matmul."""

    bytes_per_us: float
    flops_per_us: float

    @classmethod
    def measured(cls, device: torch.device) -> Ceilings:
        if device.type == "cuda":
            return cls(copy_bytes_per_us(), matmul_flops_per_us())
        source, square = torch.ones(1 << 24, dtype=torch.uint8), torch.ones(256, 256)
        target = torch.empty_like(source)
        copying = _host_us(lambda: target.copy_(source))
        return cls(2 * len(source) / copying, 2 * 256**3 / _host_us(lambda: square @ square))


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work of a step, over all layers."""

    name: str
    bytes: float
    flops: float

    def ms(self, ceilings: Ceilings) -> float:
        by_bytes, by_flops = self.bytes / ceilings.bytes_per_us, self.flops / ceilings.flops_per_us
        return max(by_bytes, by_flops) / US_PER_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A step's rows: those of `requests` requests, `cached` tokens of context each.

    drawn       rows that go through the head
    distinct    experts that were chosen, over all layers
    expanded    a prompt's rows, whose keys and values are made of the latents
    """

    tokens: int
    requests: int
    cached: int
    drawn: int
    distinct: int
    expanded: bool = False


def floor_ms(works: Sequence[Work], ceilings: Ceilings) -> float:
    return sum(work.ms(ceilings) for work in works)


def step_work(model: TargetModel, cache: KVCache, rows: Rows) -> list[Work]:
    """What a verify step of one rank does."""
    matrices = list(_matrices(model))
    size = sum(map(_bytes, matrices))
    numbers = sum(matrix.numel() for matrix in matrices)
    embedded = rows.tokens * model.config.hidden_size * model.embedding.itemsize
    return [
        Work("matrices", size + embedded, 2.0 * rows.tokens * numbers),
        _experts(model, rows),
        _attention(model, cache, rows),
        Work("head", _bytes(model.head), 2.0 * rows.drawn * model.head.numel()),
    ]


def draft_work(rank: Rank, requests: int, cached: int) -> list[Work]:
    """What drafting a block of every request does; extending its context is not in it."""
    drafter = rank.drafter
    assert drafter is not None, "rank 0 drafts"
    config, tables = drafter.network.config, drafter.tables
    head = tables.head if isinstance(tables, TargetTables) else rank.model.head
    form = mlp_form(rank.config.draft_weights, rank.facts.dtype, rank.device)
    shapes = dict(weight_shapes(config))
    numbers = sum(math.prod(shape) for name, shape in shapes.items() if "layers." in name)
    joined = math.prod(shapes["fc.weight"]) * head.itemsize  # of extending
    matrices = drafter_bytes(config, rank.facts.dtype, form).total - joined
    rows = requests * config.block_size
    tokens = sum(_seen(layer.window, cached) for layer in config.layers)
    kept = 2 * tokens * config.num_kv_heads * config.head_dim * head.itemsize
    pairs = rows * (tokens + len(config.layers) * config.block_size)
    drawn = requests * (config.block_size - 1)
    return [
        Work("draft matrices", matrices, 2.0 * rows * numbers),
        Work("draft attention", requests * kept, 4.0 * pairs * config.num_heads * config.head_dim),
        Work("draft head", _bytes(head), 2.0 * drawn * head.numel()),
    ]


def draft_sums(rank: Rank, requests: int, row_bytes: int) -> list[tuple[int, int]]:
    """What ranks that share the drafter sum in a round, how many and of how many bytes each: of
    blocks' rows, then of roots and candidates, which are few."""
    assert rank.drafter is not None, "rank 0 drafts"
    config = rank.drafter.network.config
    if config.ranks == 1:
        return []
    return [(2 + 2 * len(config.layers), requests * config.block_size * row_bytes), (2, 0)]


def _matrices(model: TargetModel) -> Iterator[Tensor]:
    """All that every row of a step is multiplied by, but for the head."""
    for layer in model.layers:
        attention: LatentAttention = layer.attention
        found = (attention.down, attention.query_up, attention.output)
        yield from (matrix for matrix in found if matrix is not None)
        yield from (attention.key_up, attention.value_up)
        mlp = layer.mlp
        dense: DenseMLP = mlp if isinstance(mlp, DenseMLP) else mlp.shared
        yield from (dense.gate_up, dense.down)
        if not isinstance(mlp, DenseMLP):
            yield mlp.router.weight


def _experts(model: TargetModel, rows: Rows) -> Work:
    layers = [layer.mlp for layer in model.layers if not isinstance(layer.mlp, DenseMLP)]
    if not layers:
        return Work("experts", 0, 0)
    sizes = [_expert_bytes(mlp) for mlp in layers]
    config, ranks = model.config, model.shard.size
    inner = config.moe_intermediate_size // ranks
    flops = 2.0 * 3 * config.hidden_size * inner * rows.tokens * config.num_experts_per_tok
    return Work("experts", rows.distinct * sum(sizes) / len(sizes), flops * len(layers))


def _expert_bytes(mlp: MoE | PackedMoE) -> float:
    if isinstance(mlp, PackedMoE):
        return (_bytes(mlp.experts.gate_up) + _bytes(mlp.experts.down)) / mlp.experts.num_experts
    return (_bytes(mlp.gate_up) + _bytes(mlp.down)) / len(mlp.gate_up)


def _attention(model: TargetModel, cache: KVCache, rows: Rows) -> Work:
    config = model.config
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    heads, layers = config.num_attention_heads // model.shard.size, model.num_layers
    row = cache.layers[0].shape[1] * cache.layers[0].itemsize
    kept = rows.requests * rows.cached + rows.tokens
    pairs = rows.tokens * rows.cached + rows.tokens  # what a tree's rows see of it is left out
    flops = 2.0 * (2 * latent + rope) * heads * pairs
    if rows.expanded:
        wide = config.qk_nope_head_dim + config.v_head_dim
        pairs = rows.tokens * rows.cached + rows.tokens**2 // 2
        flops = 2.0 * heads * ((wide + rope) * pairs + latent * wide * kept)
    return Work("attention", layers * kept * row, layers * flops)


def _seen(window: int | None, cached: int) -> int:
    return cached if window is None else min(window, cached)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _host_us(call: Callable[[], object]) -> float:
    call()
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)
