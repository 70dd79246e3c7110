"""A verifier that says what a profile wants instead of what the target said: for benchmarks alone.

Everything else of a round is real: the target runs all nodes, draws, and keeps the KV. Whether a
draft holds is drawn by a request's seed and the draft's place, so all ranks find the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.acceptance import AcceptanceProfile
from kdray.core.plan import DeviceVerified, DraftTrees, RunningRows
from kdray.kernels.ops import Ops
from kdray.kernels.round_ops import RoundOps
from kdray.model.target import TargetModel
from kdray.verifier.kv_cache import KVCache
from kdray.verifier.step_passes import StepPasses
from kdray.verifier.verifier import Verifier

DRAWS = 1 << 16  # uniform numbers; a request reads on from a place that its seed gives
SEED_STRIDE = 40_503  # odd, near DRAWS / golden ratio: seeds in a row start far apart
NO_CHILD = np.iinfo(np.int64).max  # the rank of a candidate that nobody drafted


class SyntheticVerifier(Verifier):
    """Rounds on the device accept as the profile says; steps from the host as the target says."""

    def __init__(
        self,
        model: TargetModel,
        cache: KVCache,
        ops: Ops,
        *,
        profile: AcceptanceProfile,
        draws: bool = True,
        round_ops: RoundOps | None = None,
        passes: StepPasses | None = None,
    ) -> None:
        super().__init__(model, cache, ops, draws=draws, round_ops=round_ops, passes=passes)
        self._assumed = AssumedTokens(profile, model.config.vocab_size, cache.layers[0].device)

    @torch.inference_mode()
    def verify_on_device(
        self, trees: DraftTrees, position: Tensor, rows: RunningRows
    ) -> DeviceVerified:
        verified = super().verify_on_device(trees, position, rows)
        token = self._assumed.tokens(trees, verified.token, rows.root_position, rows.seed)
        return replace(verified, token=token)


class AssumedTokens:
    """The target's tokens as a profile has them. Its children stand in a tree best first, so the
    n-th child of a node is the n-th candidate of its depth."""

    def __init__(self, profile: AcceptanceProfile, vocab: int, device: torch.device) -> None:
        self._paths = torch.from_numpy(_paths(profile)).to(device)
        self._vocab = vocab

    def tokens(self, trees: DraftTrees, said: Tensor, place: Tensor, seed: Tensor) -> Tensor:
        """[R, N] int32: the token of the child that is to be accepted, where a node has it; else
        what the target said, or, where that is a child's by chance, one that the tree has not.

        said [R, N] int32; place [R] int32, of the roots; seed [R] int64.
        """
        nodes = said.shape[1]
        is_draft = (trees.parent >= 0) & (
            torch.arange(nodes, device=said.device) < trees.num_nodes[:, None]
        )
        parent = trees.parent.long().clamp(0, nodes - 1)  # nodes of padding may say anything
        path = self._paths[(seed % DRAWS * SEED_STRIDE + place) % DRAWS]
        wanted = path.gather(1, (trees.depth.long() - 1).clamp(0, path.shape[1] - 1))
        accepted = is_draft & (_sibling_rank(parent, is_draft) == wanted)
        by_chance = is_draft & (trees.token == said.gather(1, parent))
        missed = _to_parents(parent, by_chance, self._foreign(trees, is_draft), said)
        return _to_parents(parent, accepted, trees.token, missed)

    def _foreign(self, trees: DraftTrees, is_draft: Tensor) -> Tensor:
        """[R, N] int32, a token a tree that none of its nodes has."""
        own = torch.where(is_draft, trees.token, trees.token[:, :1])
        above, below = own.amax(dim=1) + 1, own.amin(dim=1) - 1
        return torch.where(above < self._vocab, above, below)[:, None].expand_as(own)


def _paths(profile: AcceptanceProfile) -> NDArray[np.int64]:
    """[DRAWS, L]: from every place on, the candidate that holds at each depth, or NO_CHILD.

    A place's draw is the same whatever place a step starts from.
    """
    draws = np.random.default_rng(0).random(DRAWS)
    depth = np.arange(1, len(profile.marginals) + 1)
    draw = draws[(np.arange(DRAWS)[:, None] + depth) % DRAWS][:, :, None]
    on = (draw >= profile.marginals.cumsum(axis=1)).sum(axis=2)
    behind = (draw >= profile.behind_siblings.cumsum(axis=1)).sum(axis=2)
    others_before = (on != 0).cumsum(axis=1) - (on != 0)
    rank = np.where(others_before == 0, on, behind)
    return np.where(rank < profile.marginals.shape[1], rank, NO_CHILD)


def _sibling_rank(parent: Tensor, is_draft: Tensor) -> Tensor:
    """[R, N] int64: children of the same node that stand before each node."""
    alike = (parent[:, :, None] == parent[:, None, :]) & is_draft[:, None, :]
    return alike.tril(-1).sum(dim=2)


def _to_parents(parent: Tensor, chosen: Tensor, value: Tensor, otherwise: Tensor) -> Tensor:
    """`otherwise` [R, N] with value at the parent of every chosen node; one child each at most, or
    children of the same value."""
    nodes = parent.shape[1]
    room = torch.cat([otherwise, otherwise[:, :1]], dim=1)  # a last column for what is not chosen
    room.scatter_(1, parent.masked_fill(~chosen, nodes), value.to(room.dtype))
    return room[:, :nodes].contiguous()
