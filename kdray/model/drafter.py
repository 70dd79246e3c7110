"""What the driver asks of a drafter, and the DFlash drafter with its paged K/V."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kdray.config import DraftWeightType, LoadFormat
from kdray.core.plan import AcceptedPaths, Candidates, StepPlan
from kdray.core.plan import page_table as planned_pages
from kdray.core.tree import ABSENT
from kdray.errors import CheckpointError
from kdray.kernels.attention_batch import DraftAttentionBatch
from kdray.kernels.ops import Ops
from kdray.model.config import ModelConfig
from kdray.model.dflash import DFlashNetwork, LayerContext
from kdray.model.dflash_config import DFlashConfig
from kdray.model.dflash_weights import load_weights
from kdray.model.draft_int4 import mlp_form
from kdray.model.draft_rows import committed_rows
from kdray.model.parallel import Shard
from kdray.model.target import TargetModel
from kdray.model.target_tables import TargetTables, Vocabulary, tables_of


class Drafter(Protocol):
    """Guesses the next L tokens of every request from what the target said so far.

    Calls follow the round: propose, then (after the target has answered) extend, of one plan.

    depth   L, the positions it guesses ahead
    taps    target layers (0-based, after the layer) whose outputs it reads, in feature order
    """

    @property
    def depth(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def propose(self, plan: StepPlan, roots: Tensor) -> Candidates:
        """The K best tokens per depth behind roots [R] int32: arrays [R, L, K].

        A request of budget 0 costs nothing and gets absent candidates.
        """
        ...

    def extend(
        self, plan: StepPlan, paths: AcceptedPaths, features: Tensor, row_start: Sequence[int]
    ) -> None:
        """Learn what the step committed: every known row and the accepted draft nodes.

        features [T, F] has a row per row of the step; request r's are row_start[r] ..
        row_start[r + 1], its known tokens first, then nodes 1 .. of its tree.
        """
        ...


class DeviceDrafter(Protocol):
    """The same without the host, for R decoding requests whose state lives on the device."""

    def propose_on_device(
        self, roots: Tensor, root_position: Tensor, page_table: Tensor
    ) -> Candidates: ...

    def extend_on_device(
        self, paths: AcceptedPaths, features: Tensor, root_position: Tensor, page_table: Tensor
    ) -> None: ...


class DFlashDrafter:
    """DFlash over pages: context K/V sits under the same page ids as the target's.

    Where ranks share a drafter each has one: they make the same calls, and all get the answer.

    tables   the embedding and head borrowed of the target
    cache    per layer [num_pages * page_size, 2, G, D]; slots are written before they are read
    """

    def __init__(
        self,
        network: DFlashNetwork,
        tables: Vocabulary,
        *,
        ops: Ops,
        candidates: int,
        page_size: int,
        num_pages: int,
    ) -> None:
        config = network.config
        self.network = network
        self.depth = config.block_size - 1
        self.taps = config.target_layer_ids
        self.tables = tables
        self._ops = ops
        self._candidates = min(candidates, config.vocab_size)
        self._page_size = page_size
        shape = (num_pages * page_size, 2, config.num_kv_heads, config.head_dim)
        self.cache = [
            torch.zeros(shape, dtype=tables.dtype, device=tables.device) for _ in config.layers
        ]

    @classmethod
    def load(
        cls,
        folder: str | Path,
        target: TargetModel | str | Path,
        *,
        ops: Ops,
        candidates: int,
        page_size: int,
        num_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        weights: DraftWeightType = "auto",
        load_format: LoadFormat = "auto",
    ) -> DFlashDrafter:
        """The drafter of a folder for a target, whose ranks then share it, or for a target's
        folder: then this rank drafts alone.

        weights, load_format: as EngineConfig's draft_weights and load_format. A loaded target's
        dtype and device take the place of `dtype` and `device`.
        Raises CheckpointError where the folder is broken, unsupported or made for another target.
        """
        device = torch.device(device)
        config = DFlashConfig.from_folder(folder)
        shard, collectives = Shard(), None
        tables: Vocabulary
        if isinstance(target, TargetModel):
            check_fits(config, target.config, folder)
            shard, collectives = target.shard, target.collectives
            tables = tables_of(target)
            dtype, device = tables.dtype, tables.device
        else:
            check_fits(config, ModelConfig.from_folder(target), folder)
            tables = TargetTables.read(target, dtype, device, load_format)
        config.check_split(shard.size)
        form = mlp_form(weights, dtype, device)
        read = load_weights(folder, config, dtype, device, form, load_format, shard)
        return cls(
            DFlashNetwork(config.of_rank(shard.size), read, ops, shard, collectives),
            tables,
            ops=ops,
            candidates=candidates,
            page_size=page_size,
            num_pages=num_pages,
        )

    @torch.inference_mode()
    def propose(self, plan: StepPlan, roots: Tensor) -> Candidates:
        drafting = [r for r, request in enumerate(plan.requests) if request.budget > 0]
        shape = (len(plan.requests), self.depth, self._candidates)
        if not drafting:
            return _absent(shape, self._device)
        chosen = torch.tensor(drafting, device=self._device)
        requests = [plan.requests[r] for r in drafting]
        start = np.array([request.root_position for request in requests], dtype=np.int32)
        token, score = self._best(
            roots.to(self._device)[chosen],
            torch.from_numpy(start).to(self._device),
            torch.from_numpy(planned_pages(requests)).to(self._device),
        )
        if len(drafting) == len(plan.requests):
            return Candidates(token=token, score=score)
        padded = _absent(shape, self._device)
        padded.token[chosen] = token
        padded.score[chosen] = score
        return padded

    @torch.inference_mode()
    def propose_on_device(
        self, roots: Tensor, root_position: Tensor, page_table: Tensor
    ) -> Candidates:
        """propose for R requests whose state lives on the device; nothing waits for the host.

        roots, root_position [R] int32; page_table [R, P] int32. Of several ranks rank 0's roots and
        positions count; the others give any of that shape.
        """
        if self.network.config.ranks > 1:
            both = self.network.collectives.broadcast(torch.stack((roots, root_position)))
            roots, root_position = both.unbind()
        token, score = self._best(roots, root_position, page_table)
        return Candidates(token=token, score=score)

    @torch.inference_mode()
    def extend(
        self, plan: StepPlan, paths: AcceptedPaths, features: Tensor, row_start: Sequence[int]
    ) -> None:
        rows, positions, slots = (
            torch.from_numpy(column).to(self._device)
            for column in committed_rows(plan, paths, row_start, self._page_size)
        )
        known = features[rows].to(self._device, self.tables.dtype)
        layers = self.network.context_kv(known, positions)
        for cache, kv in zip(self.cache, layers, strict=True):
            cache[slots] = kv

    @torch.inference_mode()
    def extend_on_device(
        self, paths: AcceptedPaths, features: Tensor, root_position: Tensor, page_table: Tensor
    ) -> None:
        """extend for R decoding requests whose state lives on the device.

        features [R, N, F] of every node; root_position [R] int32 before the step's tokens are
        added; page_table [R, P] int32. A path shorter than the longest repeats its last node, which
        writes the same numbers to the same place again.
        """
        step = torch.arange(paths.node.shape[1], device=self._device)
        step = torch.minimum(step, paths.length.long()[:, None] - 1)
        node = paths.node.long().gather(1, step)
        rows = features.gather(1, node[..., None].expand(-1, -1, features.shape[-1]))
        position = root_position.long()[:, None] + step
        page = page_table.long().gather(1, position // self._page_size)
        slots = (page * self._page_size + position % self._page_size).flatten()
        known = rows.flatten(0, 1).to(self.tables.dtype)
        layers = self.network.context_kv(known, position.flatten())
        for cache, kv in zip(self.cache, layers, strict=True):
            cache.index_put_((slots,), kv)

    @property
    def _device(self) -> torch.device:
        return self.tables.device

    def _best(
        self, roots: Tensor, root_position: Tensor, page_table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The K best tokens and their scores [R, L, K] behind roots [R] at root_position [R]."""
        config = self.network.config
        block = roots.new_full((len(roots), config.block_size), config.mask_token_id)
        block[:, 0] = roots
        offset = torch.arange(config.block_size, device=self._device)
        embedded = self.tables.embed(block)
        contexts = self._contexts(root_position, page_table)
        hidden = self.network.draft(embedded, root_position[:, None] + offset, contexts)
        return self.tables.best(hidden, self._candidates, self._ops)

    def _contexts(self, end: Tensor, page_table: Tensor) -> list[LayerContext]:
        """Each layer's context, all that lies before the roots; layers that see alike share it."""
        batches = {
            visibility: DraftAttentionBatch(
                end=end,
                page_table=page_table,
                page_size=self._page_size,
                causal=visibility.causal,
                window=visibility.window,
            )
            for visibility in set(self.network.config.layers)
        }
        return [
            LayerContext(cache=cache, batch=batches[visibility])
            for cache, visibility in zip(self.cache, self.network.config.layers, strict=True)
        ]


def check_fits(config: DFlashConfig, target: ModelConfig, folder: str | Path) -> None:
    """Raise CheckpointError unless the drafter was made for a target of this shape."""
    pairs = (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_hidden_layers),
    )
    for name, own, wanted in pairs:
        if own != wanted:
            raise CheckpointError(
                f"the drafter in {folder} has {name} {own}, the target's is {wanted}: "
                "it was made for another target"
            )


def _absent(shape: tuple[int, int, int], device: torch.device) -> Candidates:
    return Candidates(
        token=torch.zeros(shape, dtype=torch.int32, device=device),
        score=torch.full(shape, ABSENT, dtype=torch.int32, device=device),
    )
