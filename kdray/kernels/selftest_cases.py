"""The self-test's cases: one small run of every op, whose outputs two implementations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths
from kdray.core.request import SamplingParams
from kdray.kernels import selftest_experts, selftest_products
from kdray.kernels.attention_batch import AttentionBatch, DeviceAttentionBatch, DraftAttentionBatch
from kdray.kernels.attention_rows import AnyAttentionBatch
from kdray.kernels.latent_rows import is_fp8
from kdray.kernels.ops import Ops, PartialTopk, SamplingRows
from kdray.kernels.reference import ReferenceOps
from kdray.kernels.round_ops import DrawRows, RoundOps, SlotState
from kdray.kernels.selftest_inputs import CACHED, DEPTH, NODES, RANKS, REQUESTS, Inputs

SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95)


class Tokens(NamedTuple):
    """Of fixed-point scores, which may differ in their last units."""

    score: Tensor


class Codes(NamedTuple):
    """Of numbers kept in e4m3: one that rounds otherwise in bf16 may have the code beside."""

    value: Tensor


Output = Tensor | Tokens | Codes
Outputs = Sequence[Output]
Case = Callable[[Any, Inputs], Outputs]


def _topk(ops: Ops, given: Inputs) -> Outputs:
    logits = given.drawn(4, REQUESTS, given.sizes.vocab)
    token, score = ops.topk_logprob(logits, min(RANKS, given.sizes.vocab))
    return token, Tokens(score)


def _topk_shard(ops: Ops, given: Inputs) -> Outputs:
    part = _shards(ops, given)[1]
    return part.value, part.id


def _merged_topk(ops: Ops, given: Inputs) -> Outputs:
    parts = _shards(ops, given)
    value, ids, mass = (
        torch.stack([getattr(part, field.name) for part in parts]) for field in fields(PartialTopk)
    )
    token, score = ops.merge_topk(PartialTopk(value=value, id=ids, mass=mass))
    return token, Tokens(score)


def _shards(ops: Ops, given: Inputs) -> list[PartialTopk]:
    """Of both halves of the vocabulary."""
    half = given.sizes.vocab // 2
    pieces = given.drawn(4, REQUESTS, 2 * half).split(half, dim=1)
    k = min(RANKS, half)
    return [ops.topk_partial(x.float(), k, i * half) for i, x in enumerate(pieces)]


def _trees(ops: Ops, given: Inputs) -> Outputs:
    trees = ops.build_trees(given.candidates(), given.roots(), [NODES - 1, 3, 0])
    return [getattr(trees, field.name) for field in fields(trees)]


def _rope(ops: Ops, given: Inputs) -> Outputs:
    cache = given.cache(ops)
    known = given.known(cache)
    return [Codes(known) if is_fp8(cache) else known]


def _absorb(ops: Ops, given: Inputs) -> Outputs:
    """Absorbed queries, and the rows that were written along with them."""
    sizes, rows = given.sizes, 2 * REQUESTS
    query = given.drawn(30, rows, sizes.heads, sizes.nope + sizes.rope)
    kv = given.drawn(31, rows, sizes.latent + sizes.rope)
    key_up = given.drawn(32, sizes.heads, sizes.latent, sizes.nope).mT * sizes.nope**-0.5
    cache, norm = given.cache(ReferenceOps(given.device)), given.norm(sizes.latent)
    given.settle()
    absorbed = ops.absorb_query(query, kv, cache, given.rows_placed(rows), norm, key_up)
    known = given.known(cache)
    return [absorbed, Codes(known) if is_fp8(cache) else known]


def _attention(ops: Ops, given: Inputs) -> Outputs:
    """The rows of three trees as a device round has them; those of padding mean nothing."""
    batch = DeviceAttentionBatch(
        num_cached=torch.full((REQUESTS,), CACHED, dtype=torch.int32, device=given.device),
        num_nodes=given.trees.num_nodes,
        page_table=given.page_table,
        page_size=given.sizes.page_size,
        mask=given.trees.mask,
    )
    out = _attend(ops, given, batch, REQUESTS * NODES).view(REQUESTS, NODES, -1)
    node = torch.arange(NODES, device=given.device)
    return [out * (node < given.trees.num_nodes[:, None])[..., None]]


def _prompt_attention(ops: Ops, given: Inputs) -> Outputs:
    """Prompts: all rows are known."""
    batch = AttentionBatch(
        row_start=tuple(range(0, (REQUESTS + 1) * NODES, NODES)),
        num_cached=(CACHED,) * REQUESTS,
        num_known=(NODES,) * REQUESTS,
        page_table=given.page_table,
        page_size=given.sizes.page_size,
        mask=given.trees.mask[:, :1],
    )
    return [_attend(ops, given, batch, REQUESTS * NODES)]


def _attend(ops: Ops, given: Inputs, batch: AnyAttentionBatch, rows: int) -> Tensor:
    sizes = given.sizes
    query = given.drawn(5, rows, sizes.heads, sizes.latent + sizes.rope)
    cache = given.cache(ReferenceOps(given.device))
    scale = (sizes.latent + sizes.rope) ** -0.5
    return ops.verify_attention(query, cache, batch, scale, sizes.latent)


def _draft_attention(ops: Ops, given: Inputs) -> Outputs:
    draft = given.sizes.draft
    if draft is None:
        return []
    query = given.drawn(6, REQUESTS, draft.slots, draft.heads, draft.dim)
    own = given.drawn(7, REQUESTS, draft.slots, 2, draft.groups, draft.dim)
    cache = given.drawn(8, given.num_slots, 2, draft.groups, draft.dim)
    outputs = []
    for causal, window in ((False, None), (True, 8)):
        batch = DraftAttentionBatch(
            end=torch.tensor([CACHED, 1, 20], dtype=torch.int32, device=given.device),
            page_table=given.page_table,
            page_size=given.sizes.page_size,
            causal=causal,
            window=window,
        )
        outputs.append(ops.draft_attention(query, own, cache, batch, draft.dim**-0.5))
    return outputs


def _norm(ops: Ops, given: Inputs) -> Outputs:
    x, width = given.drawn(9, 5, given.sizes.width), given.sizes.width
    return [ops.rms_norm(x, given.norm(width))]


def _add_norm(ops: Ops, given: Inputs) -> Outputs:
    x, delta = (given.drawn(seed, 5, given.sizes.width) for seed in (9, 10))
    return ops.add_rms_norm(x, delta, given.norm(given.sizes.width))


def _swiglu(ops: Ops, given: Inputs) -> Outputs:
    return [ops.swiglu(given.drawn(19, 5, 2 * given.sizes.inner))]


def _router(ops: Ops, given: Inputs) -> Outputs:
    """Logits far enough apart that a last bit decides nothing."""
    sizes = given.sizes
    if sizes.rule is None:
        return []
    generator = torch.Generator().manual_seed(20)
    order = [torch.randperm(sizes.experts, generator=generator) for _ in range(5)]
    logits = torch.stack(order).float() * (6 / sizes.experts) - 3
    bias = torch.zeros(sizes.experts, device=given.device)
    given.settle()
    return ops.route_experts(logits.to(given.device), bias, sizes.rule)


def _sample(ops: Ops, given: Inputs) -> Outputs:
    rows = SamplingRows(
        params=[SamplingParams(temperature=0.0), SAMPLED, SAMPLED],
        seed=[1, 2, 3],
        position=[4, 5, 6],
        history=[None] * 3,
        end_token_ids=[frozenset()] * 3,
    )
    return [ops.sample_tokens(given.drawn(24, 3, given.sizes.vocab, dtype=torch.float32), rows)]


def _accept(ops: Ops | RoundOps, given: Inputs) -> Outputs:
    paths = ops.accept_paths(given.trees, given.targets(), DEPTH)
    return [paths.node, paths.length, paths.bonus]


def _commit(ops: Ops, given: Inputs) -> Outputs:
    cache = given.cache(ReferenceOps(given.device)).contiguous()
    slots = given.slots()[0]
    ops.commit_kv([cache], slots[CACHED + 2 :], slots[CACHED : CACHED + NODES - 2])
    return [given.known(cache)]


def _paths(given: Inputs) -> AcceptedPaths:
    return ReferenceOps(given.device).accept_paths(given.trees, given.targets(), DEPTH)


def _placed_trees(ops: RoundOps, given: Inputs) -> Outputs:
    budgets = torch.tensor([NODES - 1, 3, 0], dtype=torch.int32, device=given.device)
    base = torch.full((REQUESTS,), CACHED, dtype=torch.int32, device=given.device)
    built = ops.build_trees(given.candidates(), given.roots(), budgets, base, NODES)
    counted = torch.arange(NODES, device=given.device) < built.trees.num_nodes[:, None]
    return [built.trees.token, built.trees.parent, built.trees.mask, built.trees.num_nodes,
            built.position * counted]  # fmt: skip


def _draw(ops: RoundOps, given: Inputs) -> Outputs:
    running = given.running()
    rows = DrawRows(
        temperature=running.temperature,
        top_k=running.top_k,
        top_p=running.top_p,
        min_p=running.min_p,
        seed=running.seed,
        position=running.root_position + 1,
        drops=True,
    )
    logits = given.drawn(25, REQUESTS, given.sizes.vocab, dtype=torch.float32)
    drawn = ops.draw_tokens(logits, rows)
    return [drawn.token, drawn.dead]


def _commit_paths(ops: RoundOps, given: Inputs) -> Outputs:
    cache = given.cache(ReferenceOps(given.device)).contiguous()
    ops.commit_paths([cache], _paths(given), given.running())
    return [given.known(cache)]


def _advance(ops: RoundOps, given: Inputs) -> Outputs:
    running = given.running()
    state = SlotState(
        root=running.root.clone(),
        root_position=running.root_position.clone(),
        page_table=running.page_table,
        page_size=running.page_size,
    )
    slot = torch.tensor([2, -1, 0], dtype=torch.int32, device=given.device)
    ops.advance_requests(state, _paths(given), slot)
    return [state.root, state.root_position]


CASES: dict[str, Case] = {
    "topk_logprob": _topk,
    "topk_partial": _topk_shard,
    "merge_topk": _merged_topk,
    "build_trees": _trees,
    "rope_cache": _rope,
    "verify_attention": _attention,
    "verify_attention of prompts": _prompt_attention,
    "draft_attention": _draft_attention,
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "absorb_query": _absorb,
    "per_head": selftest_products.per_head,
    "linear": selftest_products.linear,
    "norm_linear": selftest_products.norm_linear,
    "gated_linear": selftest_products.gated_linear,
    "linear_and_gated": selftest_products.linear_and_gated,
    "swiglu": _swiglu,
    "route_experts": _router,
    "moe_w4a16": selftest_experts.some_rows,
    "moe_w4a16_few": selftest_experts.few_rows,
    "moe_w4a16_many": selftest_experts.many_rows,
    "sample_tokens": _sample,
    "accept_paths": _accept,
    "commit_kv": _commit,
}
ROUND_CASES: dict[str, Case] = {
    "build_trees of rounds": _placed_trees,
    "draw_tokens": _draw,
    "accept_paths of rounds": _accept,
    "commit_paths": _commit_paths,
    "advance_requests": _advance,
}
