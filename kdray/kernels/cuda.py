"""The ops of a round as CUDA kernels; reference.py is their oracle and serves what they do not.

What a kernel does not take (a wider vocabulary, float16, odd rows, larger trees) runs by the
reference on the same device: slower, never different.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import ref

import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths, Candidates, DraftTrees
from kdray.kernels import (
    cuda_absorb,
    cuda_accept,
    cuda_attention,
    cuda_commit,
    cuda_draft,
    cuda_gemm,
    cuda_moe,
    cuda_norm_gemm,
    cuda_sampling,
    cuda_topk,
    cuda_trees,
)
from kdray.kernels.attention_batch import DraftAttentionBatch
from kdray.kernels.attention_rows import AnyAttentionBatch
from kdray.kernels.cuda_commit import CacheTable
from kdray.kernels.cuda_fused import CudaFused
from kdray.kernels.cuda_gemm import CudaGemm
from kdray.kernels.loader import KernelLoader
from kdray.kernels.moe_layout import PackedExperts
from kdray.kernels.ops import LiveRows, Norm, PartialTopk, PlacedRows, RoutingRule, SamplingRows
from kdray.kernels.reference import ReferenceOps


class CudaOps:
    """kernels.ops.Ops on one CUDA device.

    Nothing waits for the device save sampling, which looks for rows without a finite logit, and
    what the reference does. Workspaces belong to this object: use it on one stream at a time.
    """

    batch_invariant = False

    def __init__(self, device: torch.device, loader: KernelLoader | None = None) -> None:
        self.loader = loader or KernelLoader(device)
        self.device = self.loader.device
        self._reference = ReferenceOps(self.device)
        self._attention = cuda_attention.CudaAttention(self.loader)
        self._draft_attention = cuda_draft.CudaDraftAttention(self.loader)
        self._fused = CudaFused(self.loader)
        self._gemm = CudaGemm(self.loader)
        self._moe = cuda_moe.CudaMoe(self.loader)
        self._topk = cuda_topk.CudaTopk(self.loader)
        self._sampling = cuda_sampling.CudaSampling(self.loader)
        self._commits: dict[tuple[int, ...], _CommitPlan] = {}

    def topk_logprob(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        fits = logits.dtype in cuda_topk.DTYPES and 0 < logits.shape[-1] <= cuda_topk.MAX_VOCAB
        if not fits or k > cuda_topk.MAX_K:
            return self._reference.topk_logprob(logits, k)
        return self._topk.topk_logprob(logits, k)

    def topk_partial(self, logits: Tensor, k: int, first_id: int) -> PartialTopk:
        return self._topk.topk_partial(logits, k, first_id)

    def merge_topk(self, shards: PartialTopk) -> tuple[Tensor, Tensor]:
        return self._topk.merge_topk(shards.value, shards.id, shards.mass)

    def build_trees(
        self, candidates: Candidates, roots: Tensor, budgets: Sequence[int]
    ) -> DraftTrees:
        max_budget = max([0, *budgets])
        candidates = _first_ranks(candidates, max_budget)
        _, depth, width = candidates.score.shape
        fits = depth <= cuda_trees.MAX_DEPTH and width <= cuda_trees.MAX_WIDTH
        if not fits or max_budget > cuda_trees.DESIGNS[-1].max_budget:
            return self._reference.build_trees(candidates, roots, budgets)
        wishes = self._upload(budgets)
        return cuda_trees.build_trees(self.loader, candidates, roots, wishes, max_budget).trees

    def verify_attention(
        self,
        query: Tensor,
        cache: Tensor,
        batch: AnyAttentionBatch,
        scale: float,
        latent_dim: int,
    ) -> Tensor:
        if not cuda_attention.takes(query, cache, batch.page_size, latent_dim):
            return self._reference.verify_attention(query, cache, batch, scale, latent_dim)
        return self._attention.verify_attention(query, cache, batch, scale, latent_dim)

    def draft_attention(
        self, query: Tensor, own: Tensor, cache: Tensor, batch: DraftAttentionBatch, scale: float
    ) -> Tensor:
        if not cuda_draft.takes(query, own, cache, batch):
            return self._reference.draft_attention(query, own, cache, batch, scale)
        return self._draft_attention.draft_attention(query, own, cache, batch, scale)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self._fused.rms_norm(x, norm)

    def add_rms_norm(self, x: Tensor, delta: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return self._fused.add_rms_norm(x, delta, norm)

    def rope_cache(
        self, query: Tensor, kv: Tensor, cache: Tensor, rows: PlacedRows, norm: Norm
    ) -> Tensor:
        return self._fused.rope_cache(query, kv, cache, rows, norm)

    def absorb_query(
        self,
        query: Tensor,
        kv: Tensor,
        cache: Tensor,
        rows: PlacedRows,
        norm: Norm,
        key_up: Tensor,
    ) -> Tensor:
        if cuda_absorb.takes(query, kv, cache, rows, norm, key_up):
            return cuda_absorb.absorb_query(self._gemm, query, kv, cache, rows, norm, key_up)
        _, nope, latent_dim = key_up.shape
        absorbed = self.rope_cache(query, kv, cache, rows, norm)
        self.per_head(query[..., :nope], key_up, absorbed[..., :latent_dim])
        return absorbed

    def per_head(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if not cuda_gemm.takes_heads(x, weight, out):
            return self._fused.per_head(x, weight, out)
        return self._gemm.per_head(x, weight, out)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        dtype: torch.dtype | None = None,
        add: Tensor | None = None,
    ) -> Tensor:
        return self._gemm.linear(x, weight, dtype=dtype, add=add)

    def norm_linear(self, x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
        if cuda_norm_gemm.takes(self._gemm, x, norm, weight):
            return cuda_norm_gemm.norm_linear(self._gemm, x, norm, weight)
        return self.linear(self.rms_norm(x, norm), weight)

    def gated_linear(self, x: Tensor, gate_up: Tensor) -> Tensor:
        return self._gemm.gated_linear(x, gate_up)

    def linear_and_gated(
        self, x: Tensor, weight: Tensor, gate_up: Tensor, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._gemm.linear_and_gated(x, weight, gate_up, dtype=dtype)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self._fused.swiglu(gate_up)

    def route_experts(
        self, logits: Tensor, bias: Tensor, rule: RoutingRule, live: LiveRows | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._fused.route_experts(logits, bias, rule, live)

    def moe_w4a16(
        self,
        x: Tensor,
        expert: Tensor,
        weight: Tensor,
        experts: PackedExperts,
        shared: Tensor,
    ) -> Tensor:
        if not cuda_moe.takes(x, expert, weight, experts, shared):
            return self._reference.moe_w4a16(x, expert, weight, experts, shared)
        return self._moe.moe_w4a16(x, expert, weight, experts, shared)

    def sample_tokens(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """As in Ops; what it waits for are the flags of rows without any finite logit, which raise
        ValueError. Within a graph use CudaSampling, which hands the flags out."""
        fits = len(logits) > 0 and 0 < logits.shape[1] <= cuda_sampling.MAX_VOCAB
        if not fits:
            return self._reference.sample_tokens(logits, rows)
        if logits.dtype not in cuda_topk.DTYPES:
            logits = logits.float()
        drawn = self._sampling.sample_tokens(logits.contiguous(), rows)
        if drawn.dead.any().item():
            raise ValueError(
                f"row {int(drawn.dead.argmax())}: no finite logit is left to draw from; "
                "the model's weights or its input are broken"
            )
        return drawn.token

    def accept_paths(self, trees: DraftTrees, target: Tensor, depth: int) -> AcceptedPaths:
        if trees.token.shape[1] > cuda_accept.MAX_NODES:
            return self._reference.accept_paths(trees, target, depth)
        columns = {"token": trees.token, "parent": trees.parent, "num_nodes": trees.num_nodes}
        whole = replace(trees, **{name: column.contiguous() for name, column in columns.items()})
        return cuda_accept.accept_paths(self.loader, whole, target.contiguous(), depth).paths

    def commit_kv(self, caches: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
        if len(source) > cuda_commit.MAX_ROWS:
            return self._reference.commit_kv(caches, source, target)
        plan = self._commit_plan(caches)
        if plan.table is not None:
            cuda_commit.commit_kv(self.loader, plan.table, source.contiguous(), target.contiguous())
        self._reference.commit_kv([caches[i] for i in plan.others], source, target)

    def _commit_plan(self, caches: Sequence[Tensor]) -> _CommitPlan:
        """Made once for a list of caches, and dropped when one of them is gone."""
        key = tuple(map(id, caches))
        plan = self._commits.get(key)
        if plan is None or not plan.is_of(caches):
            self._commits = {k: p for k, p in self._commits.items() if p.is_alive()}
            plan = self._commits[key] = _CommitPlan.of(caches)
        return plan

    def _upload(self, numbers: Sequence[int]) -> Tensor:
        """[R] int32 on the device, from memory the copy need not wait for."""
        pinned = self.device.type == "cuda"
        host = torch.tensor(list(numbers), dtype=torch.int32, pin_memory=pinned)
        return host.to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _CommitPlan:
    """How a list of caches is committed: a table of those the kernels move, places of the others.

    The caches are not kept alive: a table is good for as long as they are.
    """

    caches: tuple[ref[Tensor], ...]
    table: CacheTable | None
    others: tuple[int, ...]

    @classmethod
    def of(cls, caches: Sequence[Tensor]) -> _CommitPlan:
        ours = [cache for cache in caches if cuda_commit.movable(cache)]
        return cls(
            caches=tuple(map(ref, caches)),
            table=CacheTable.of(ours) if ours else None,
            others=tuple(i for i, cache in enumerate(caches) if not cuda_commit.movable(cache)),
        )

    def is_of(self, caches: Sequence[Tensor]) -> bool:
        """An id may come back with another object behind it."""
        return all(own() is cache for own, cache in zip(self.caches, caches, strict=True))

    def is_alive(self) -> bool:
        return all(own() is not None for own in self.caches)


def _first_ranks(candidates: Candidates, max_budget: int) -> Candidates:
    """Without the ranks that no tree of this budget can hold, where kernels could not take all."""
    wide = candidates.score.shape[2] > cuda_trees.MAX_WIDTH
    ranks = slice(max(max_budget, 1) if wide else None)
    return Candidates(
        token=candidates.token[..., ranks].contiguous(),
        score=candidates.score[..., ranks].contiguous(),
    )
