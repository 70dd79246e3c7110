"""The ops of a round in torch, for any device: clear, exact, and the oracle of the CUDA kernels.

Trees and sampling run on the host in core's own code, so the reference cannot drift from the paper;
attention and top-k run on the tensors' device.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.plan import AcceptedPaths, Candidates, DraftTrees
from kdray.core.tree import (
    ABSENT,
    WORD_BITS,
    DraftTree,
    Path,
    ancestor_mask,
    build_tree,
    follow,
)
from kdray.kernels import reference_fused, reference_moe, reference_topk
from kdray.kernels.attention_batch import AttentionBatch, DeviceAttentionBatch, DraftAttentionBatch
from kdray.kernels.attention_rows import AnyAttentionBatch, AttentionRows
from kdray.kernels.ops import SamplingRows
from kdray.kernels.reference_attention import (
    AttentionTile,
    attend,
    attend_on_device,
    planned_rows,
    scatter,
    tile_batch,
)
from kdray.kernels.reference_draft import BlockView, attend_blocks
from kdray.kernels.reference_gemm import (
    gated_linear,
    linear,
    linear_and_gated,
    norm_linear,
)
from kdray.kernels.reference_sampling import sample_tokens


class ReferenceOps:
    """kernels.ops.Ops without a kernel of our own."""

    batch_invariant = False
    rms_norm = staticmethod(reference_fused.rms_norm)
    add_rms_norm = staticmethod(reference_fused.add_rms_norm)
    rope_cache = staticmethod(reference_fused.rope_cache)
    absorb_query = staticmethod(reference_fused.absorb_query)
    per_head = staticmethod(reference_fused.per_head)
    swiglu = staticmethod(reference_fused.swiglu)
    linear = staticmethod(linear)
    norm_linear = staticmethod(norm_linear)
    gated_linear = staticmethod(gated_linear)
    linear_and_gated = staticmethod(linear_and_gated)
    route_experts = staticmethod(reference_fused.route_experts)
    moe_w4a16 = staticmethod(reference_moe.moe_w4a16)
    topk_logprob = staticmethod(reference_topk.topk_logprob)
    topk_partial = staticmethod(reference_topk.topk_partial)
    merge_topk = staticmethod(reference_topk.merge_topk)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Every layer of a step attends alike, so who sees whom is laid out once a batch.
        self._tiles: WeakKeyDictionary[AttentionBatch, list[AttentionTile]] = WeakKeyDictionary()
        self._planned: WeakKeyDictionary[AttentionRows, tuple[Tensor, AttentionBatch]] = (
            WeakKeyDictionary()
        )
        self._views: WeakKeyDictionary[DraftAttentionBatch, BlockView] = WeakKeyDictionary()

    def build_trees(
        self, candidates: Candidates, roots: Tensor, budgets: Sequence[int]
    ) -> DraftTrees:
        if not any(budgets):
            return _roots_alone(roots)
        return self.build_padded_trees(candidates, roots, budgets, 1 + max(budgets))

    def build_padded_trees(
        self, candidates: Candidates, roots: Tensor, budgets: Sequence[int], num_nodes: int
    ) -> DraftTrees:
        """build_trees with room for num_nodes nodes, which no tree exceeds."""
        token, score = candidates.token.cpu().numpy(), candidates.score.cpu().numpy()
        trees = [
            build_tree(root, token[r], score[r], budget)
            for r, (root, budget) in enumerate(zip(roots.tolist(), budgets, strict=True))
        ]
        return _pad_trees(trees, num_nodes, self.device)

    def verify_attention(
        self,
        query: Tensor,
        cache: Tensor,
        batch: AnyAttentionBatch,
        scale: float,
        latent_dim: int,
    ) -> Tensor:
        if isinstance(batch, DeviceAttentionBatch):
            return attend_on_device(query, cache, batch, scale, latent_dim)
        if isinstance(batch, AttentionRows):
            return self._attend_planned(query, cache, batch, scale, latent_dim)
        tiles = self._tiles.get(batch)
        if tiles is None:
            tiles = self._tiles[batch] = tile_batch(batch)
        if len(tiles) == 1 and tiles[0].rows is None:
            return attend(query, cache, tiles[0], scale, latent_dim)
        out = query.new_empty(*query.shape[:2], latent_dim)
        for tile in tiles:
            scatter(attend(query, cache, tile, scale, latent_dim), tile, out)
        return out

    def _attend_planned(
        self, query: Tensor, cache: Tensor, batch: AttentionRows, scale: float, latent_dim: int
    ) -> Tensor:
        """By the numbers that the device has, read back."""
        found = self._planned.get(batch)
        if found is None:
            found = self._planned[batch] = planned_rows(batch)
        rows, on_host = found
        out = query.new_zeros(*query.shape[:2], latent_dim)
        if len(rows):
            out[rows] = self.verify_attention(query[rows], cache, on_host, scale, latent_dim)
        return out

    def draft_attention(
        self, query: Tensor, own: Tensor, cache: Tensor, batch: DraftAttentionBatch, scale: float
    ) -> Tensor:
        view = self._views.get(batch)
        if view is None:
            view = self._views[batch] = BlockView.of(batch, query.shape[1])
        return attend_blocks(query, own, cache, view, scale)

    def sample_tokens(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        token = sample_tokens(logits.float().cpu().numpy(), rows)
        return torch.from_numpy(token).to(logits.device)

    def accept_paths(self, trees: DraftTrees, target: Tensor, depth: int) -> AcceptedPaths:
        if trees.token.shape[1] == 1:
            return _stay(target, depth)
        drawn = target.cpu().numpy()
        paths = [
            _follow_or_stay(tree, drawn[r], depth) for r, tree in enumerate(_host_trees(trees))
        ]
        node = np.zeros((len(paths), 1 + depth), dtype=np.int32)
        for row, path in zip(node, paths, strict=True):
            row[: len(path.node)] = path.node
        length = np.array([len(path.node) for path in paths], dtype=np.int32)
        bonus = np.array([path.bonus for path in paths], dtype=np.int32)
        node_t, length_t, bonus_t = (
            torch.from_numpy(array).to(target.device) for array in (node, length, bonus)
        )
        return AcceptedPaths(node=node_t, length=length_t, bonus=bonus_t)

    def commit_kv(self, caches: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
        for cache in caches:
            cache[target] = cache[source]  # indexing copies: all is read before the first write


def _roots_alone(roots: Tensor) -> DraftTrees:
    """Trees of budget 0, as plain decoding has in every step."""
    token = roots.int()[:, None]
    zero, one = torch.zeros_like(token), torch.ones_like(token)
    return DraftTrees(
        token=token, parent=-one, depth=zero, score=zero, mask=one[:, None], num_nodes=one[:, 0]
    )


def _pad_trees(trees: Sequence[DraftTree], num_nodes: int, device: torch.device) -> DraftTrees:
    """Padding nodes are parentless, absent, and see themselves alone."""
    shape = (len(trees), num_nodes)
    token, depth = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    parent, score = np.full(shape, -1, np.int32), np.full(shape, ABSENT, np.int32)
    mask = np.zeros((*shape, -(-num_nodes // WORD_BITS)), np.uint32)
    node = np.arange(num_nodes)
    mask[:, node, node // WORD_BITS] = np.left_shift(np.uint32(1), (node % WORD_BITS).astype("u4"))
    for r, tree in enumerate(trees):
        own = slice(0, tree.num_nodes)
        token[r, own], parent[r, own] = tree.token, tree.parent
        depth[r, own], score[r, own] = tree.depth, tree.score
        words = ancestor_mask(tree.parent)
        mask[r, own, : words.shape[1]] = words
    counts = np.array([tree.num_nodes for tree in trees], np.int32)

    def tensor(array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return DraftTrees(
        token=tensor(token),
        parent=tensor(parent),
        depth=tensor(depth),
        score=tensor(score),
        mask=tensor(mask.view(np.int32)),
        num_nodes=tensor(counts),
    )


def _stay(target: Tensor, depth: int) -> AcceptedPaths:
    """The paths of roots without drafts."""
    node = target.new_zeros(len(target), 1 + depth, dtype=torch.int32)
    return AcceptedPaths(
        node=node, length=torch.ones_like(node[:, 0]), bonus=target[:, 0].to(torch.int32)
    )


def _host_trees(trees: DraftTrees) -> list[DraftTree]:
    columns = [
        column.cpu().numpy() for column in (trees.token, trees.parent, trees.depth, trees.score)
    ]
    counts = trees.num_nodes.tolist()
    width = trees.token.shape[1]
    # A count that cannot be is cut to none: the walk then stays at the root.
    counts = [count if 1 <= count <= width else 0 for count in counts]
    return [DraftTree(*(column[r, :count] for column in columns)) for r, count in enumerate(counts)]


def _follow_or_stay(tree: DraftTree, drawn: NDArray[np.int32], depth: int) -> Path:
    """The target's way, at most `depth` drafts long; the root alone where the tree is malformed."""
    try:
        node = follow(tree, drawn).node[: 1 + depth]
    except ValueError:
        node = (0,)
    return Path(node=node, bonus=int(drawn[node[-1]]))
