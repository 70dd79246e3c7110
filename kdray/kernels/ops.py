"""The ops of a round: one contract, two implementations (reference.py in torch, CUDA through CuPy).

Shape letters: R requests, T rows of a step, N nodes of a tree, L depth, K candidates, H heads,
C latent dim, D rope dim, S cache slots, V vocabulary, W words of an ancestor row = ceil(N / 32),
E width of the residual stream, X experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths, Candidates, DraftTrees
from kdray.core.request import SamplingParams
from kdray.kernels.attention_batch import DraftAttentionBatch
from kdray.kernels.attention_rows import AnyAttentionBatch
from kdray.kernels.moe_layout import PackedExperts

NO_ID = 2**31 - 1  # of a token that a shard does not have


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveRows:
    """Which rows of a device round stand for something; the others are padding.

    Row r * nodes + i is one where i < num_nodes[r] and slot[r] is not below 0.

    slot, num_nodes   [R] int32
    """

    slot: Tensor
    num_nodes: Tensor
    nodes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingRows:
    """How each of M rows of logits is drawn.

    params     M entries; rows of one request share the object
    seed       M integers, 0 <= seed < 2^63
    position   M integers: absolute position of the token being drawn (its node's position + 1)
    history    M entries: (prompt tokens, output tokens up to and including this row's own node)
               where the row's params.uses_history, else None
    end_token_ids   M sets: tokens held back until params.min_tokens outputs exist
    """

    params: Sequence[SamplingParams]
    seed: Sequence[int]
    position: Sequence[int]
    history: Sequence[tuple[Sequence[int], Sequence[int]] | None]
    end_token_ids: Sequence[frozenset[int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialTopk:
    """The best tokens of M rows in one shard of the vocabulary; of N shards [N, M, ..] each.

    value   [M, k] float32, best first; -inf where the shard has fewer than k tokens
    id      [M, k] int32 token ids; NO_ID where the shard has fewer
    mass    [M, 3] int64: what all the shard's tokens weigh, in the implementation's own numbers
    """

    value: Tensor
    id: Tensor
    mass: Tensor


class Norm(Protocol):
    """An RMSNorm's parameters: weight [E], eps [] fp32 on the device."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def eps(self) -> Tensor: ...


class PlacedRows(Protocol):
    """Where T rows stand in their texts and in the cache.

    turns   [T, D / 2] complex64: the rotation of every rope pair at the row's position
    slot    [T] int64: the cache slot that takes the row's KV
    """

    @property
    def turns(self) -> Tensor: ...
    @property
    def slot(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How experts are chosen, as config.json says.

    top_k         experts a row
    num_groups    groups of neighbouring experts, of which top_groups are looked at; 1: no groups
    normalize     whether a row's weights are divided by their sum
    scale         what they are multiplied by
    """

    top_k: int
    num_groups: int
    top_groups: int
    normalize: bool
    scale: float


class Ops(Protocol):
    """Chosen once, by load_ops(device); everybody else receives it."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits are the same whatever else is in its step."""
        ...

    def topk_logprob(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best tokens of each row with their full-vocabulary log-probs in fixed point.

        logits [.., V] float -> token [.., k] int32, score [.., k] int32 (core.tree's contract), by
        value descending, then token id ascending. NaN and -inf logits are absent (score ABSENT) and
        come last. V < k pads with absent entries of token 0.
        """
        ...

    def topk_partial(self, logits: Tensor, k: int, first_id: int) -> PartialTopk:
        """topk_logprob of a shard [M, V'] float32 whose first column is token first_id, still to be
        merged with the others'."""
        ...

    def merge_topk(self, shards: PartialTopk) -> tuple[Tensor, Tensor]:
        """All shards' parts, [N, M, ..], to topk_logprob's token and score [M, k] of the whole.

        The same to the bit where every shard starts at a multiple of 1024; else log-sum-exps may
        differ by float32 rounding.
        """
        ...

    def build_trees(
        self, candidates: Candidates, roots: Tensor, budgets: Sequence[int]
    ) -> DraftTrees:
        """Best-first DDTree of every request; roots [R] int32. N = 1 + max(budgets).

        Equals core.tree.build_tree exactly.
        """
        ...

    def verify_attention(
        self,
        query: Tensor,
        cache: Tensor,
        batch: AnyAttentionBatch,
        scale: float,
        latent_dim: int,
    ) -> Tensor:
        """Absorbed MLA over the paged latent cache with a draft tree behind the prefix.

        query [T, H, C + D], cache [S, C + D] -> [T, H, C]: softmax(scale * q . key) over the
        visible keys, values being the first C = latent_dim numbers of a key; softmax in fp32.
        The rows' own KV is already in the cache, which may have rows in fp8 (latent_rows.py).
        """
        ...

    def draft_attention(
        self, query: Tensor, own: Tensor, cache: Tensor, batch: DraftAttentionBatch, scale: float
    ) -> Tensor:
        """A drafter's blocks over their paged context and over themselves.

        query [R, S, H, D]; own [R, S, 2, G, D], the blocks' keys and values; cache [.., 2, G, D] ->
        [R, S, H, D]: softmax(scale * q . key) over the visible keys, of key head h / (H / G);
        softmax in fp32. Nothing is read of a context beyond its end.
        """
        ...

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """RMSNorm of x [.., E] over its last dimension; reference_fused has the formula."""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """x + delta [.., E], and the norm of that."""
        ...

    def rope_cache(
        self, query: Tensor, kv: Tensor, cache: Tensor, rows: PlacedRows, norm: Norm
    ) -> Tensor:
        """Write the rows' KV, and rotate their queries.

        kv [T, C + D] as projected: cache[slot] = [norm(latent) | rotated key], cache [S, C + D] or
        rows in fp8 (latent_rows.py).
        query [T, H, N + D] -> [T, H, C + D], whose last D numbers are the query's, rotated. The
        first C hold nothing yet: W_UK's share of an absorbed query goes there.
        """
        ...

    def absorb_query(
        self,
        query: Tensor,
        kv: Tensor,
        cache: Tensor,
        rows: PlacedRows,
        norm: Norm,
        key_up: Tensor,
    ) -> Tensor:
        """rope_cache, and in the first C numbers of a query per_head(query[..., :N], key_up): the
        whole of what verify_attention reads. key_up [H, N, C], written before the launch in front.
        """
        ...

    def per_head(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """x [T, H, A], weight [H, A, B] -> x[t, h] @ weight[h], [T, H, B]; written to `out` if
        given, whose rows and heads may lie any distance apart."""
        ...

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        dtype: torch.dtype | None = None,
        add: Tensor | None = None,
    ) -> Tensor:
        """x [T, I] @ weight [I, O], + add [T, O] if given -> [T, O] in `dtype`, x's own if None.

        Sums are fp32. On a GPU up to 128 rows of bf16 whose matrix has an output's weights side by
        side (as the checkpoint's, transposed as a view) have bits that do not depend on the batch;
        such weights must have been written before the launch in front.
        """
        ...

    def norm_linear(self, x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
        """linear(rms_norm(x, norm), weight), to the bit; norm and weight are constants."""
        ...

    def gated_linear(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """swiglu(linear(x, gate_up)): x [T, E], gate_up [E, 2 I] -> [T, I]."""
        ...

    def linear_and_gated(
        self, x: Tensor, weight: Tensor, gate_up: Tensor, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """linear(x, weight, dtype=dtype) and gated_linear(x, gate_up), to the bit."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """[.., 2 I], gate then up -> silu(gate) * up [.., I]."""
        ...

    def route_experts(
        self, logits: Tensor, bias: Tensor, rule: RoutingRule, live: LiveRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """The noaux_tc router: logits [T, X] fp32, bias [X] fp32 -> expert [T, k] int64, best first
        (the lower expert and group among equals), and weight [T, k] fp32. Rows that are not live
        get experts -1 of weight 0."""
        ...

    def moe_w4a16(
        self,
        x: Tensor,
        expert: Tensor,
        weight: Tensor,
        experts: PackedExperts,
        shared: Tensor,
    ) -> Tensor:
        """x [T, E], routed to expert [T, k] int64 with weight [T, k] fp32 -> [T, E].

        Sum over a row's experts, in order, of weight * down(silu(gate x) * up x), + shared [T, E].
        A row's experts are distinct, or -1 of weight 0: none. Sums are fp32; what is between the
        products, and an expert's output, are rounded to x's dtype once. On a GPU a row's bits do
        not depend on its batch.
        """
        ...

    def sample_tokens(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Addressed sampling (core.sampling): logits [M, V] float32 -> [M] int32."""
        ...

    def accept_paths(self, trees: DraftTrees, target: Tensor, depth: int) -> AcceptedPaths:
        """Follow the target's tokens [R, N] int32 through each tree; paths hold 1 + depth nodes.

        Equals core.tree.follow. A malformed tree yields a path of the root alone.
        """
        ...

    def commit_kv(self, caches: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
        """Copy cache rows source [M] -> target [M] (slot numbers, int64) in every cache [S, ..].

        All rows are read before any is written.
        """
        ...


def load_ops(device: str | torch.device, *, batch_invariant: bool = False) -> Ops:
    """The implementation for a device; the only place that asks which one.

    batch_invariant: for models in bfloat16 on a GPU; raises ValueError elsewhere.
    """
    device = torch.device(device)
    if batch_invariant and device.type != "cuda":
        raise ValueError(f"batch-invariant ops are for GPUs, not for {device}")
    if batch_invariant:
        from kdray.kernels.invariant_ops import InvariantOps

        return InvariantOps(device)
    if device.type == "cuda":
        from kdray.kernels.cuda import CudaOps

        return CudaOps(device)
    from kdray.kernels.reference import ReferenceOps

    return ReferenceOps(device)
