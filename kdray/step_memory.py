"""The arrays that steps hold at once, by figures: of the largest step from the host, and of the
rounds in CUDA graphs, which keep theirs for good."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kdray.config import EngineConfig
from kdray.core.buckets import Buckets, pass_sizes
from kdray.kernels.cuda_invariant import LAUNCH_ITEMS, items_of, workspace_bytes
from kdray.model.config import ModelConfig
from kdray.model.dflash_config import DFlashConfig
from kdray.model.mla import EXPAND_FROM_ROWS, ROW_BLOCK_FUSED, key_block
from kdray.model.moe import DENSE_ROWS, GATHER_COST

MIB = 1 << 20
KEPT_BYTES = 128 * MIB  # by our kernels from launch to launch: parts of attention's tiles, keys
GRAPH_NODE_BYTES = 10 << 10  # a captured kernel's, on the device
NODES_A_LAYER, NODES_A_ROUND = 18, 60  # kernels of a layer, and of a round beside its layers
NODES_A_PASS_LAYER = 22  # of more than 128 rows
LOGITS_COPIES = 3  # fp32 rows of the vocabulary: a rank's part, the whole, and one being made


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Of one rank, by its shapes; drafter: where the rank has it."""

    config: EngineConfig
    model: ModelConfig
    drafter: DFlashConfig | None
    dtype: torch.dtype
    packed: bool
    on_gpu: bool

    @property
    def workspaces(self) -> int:
        """A step of prompts and trees: its rows in the widest layer, and logits of its trees."""
        held = self._layer_bytes(self._drawn + self.config.prefill_chunk)
        held += max(self._drawn_bytes(self._drawn), self._draft_logits)
        return held + self._expanded_bytes() + (self._kept_bytes if self.on_gpu else 0)

    @property
    def _kept_bytes(self) -> int:
        own = workspace_bytes(self.model.kv_lora_rank) if self.config.batch_invariant else 0
        return KEPT_BYTES + own

    @property
    def graphs(self) -> int:
        """Every round and every planned step's pass that is captured, by its kernels, and the pool
        that their arrays share.

        Ranks deal the rows of a round's logits out, so each holds its part of them. Of a pass its
        output stays.
        """
        buckets = Buckets.of(self.config.max_requests, self.config.budget)
        layers = self.model.num_hidden_layers + (len(self.drafter.layers) if self.drafter else 0)
        nodes = GRAPH_NODE_BYTES * sum(
            layers * NODES_A_LAYER * self._slices(requests * num_nodes) + NODES_A_ROUND
            for requests, num_nodes in buckets.sizes()
        )
        logits = self._drawn_bytes(-(-self._drawn // self.config.tp))
        round_holds = self._layer_bytes(self._drawn) + max(logits, self._draft_logits)
        pass_holds = self._layer_bytes(pass_sizes(self.config.prefill_chunk)[-1])
        return nodes + self._step_passes + max(round_holds, pass_holds)

    @property
    def _step_passes(self) -> int:
        """Their kernels and outputs; the last norm's holds the sum before it, too."""
        sizes, layers = pass_sizes(self.config.prefill_chunk), self.model.num_hidden_layers
        slices = sum(self._slices(rows) for rows in sizes)
        nodes = slices * layers * NODES_A_PASS_LAYER * GRAPH_NODE_BYTES
        kept = sum(sizes) * (2 + self._taps) * self.model.hidden_size * self.dtype.itemsize
        return nodes + kept

    def _slices(self, rows: int) -> int:
        """Launches for one: batch-invariant ops take rows in slices, and attention heads, too."""
        if not self.config.batch_invariant:
            return 1
        heads = self.model.num_attention_heads // self.config.tp
        return -(-rows * items_of(heads) // LAUNCH_ITEMS)

    @property
    def _taps(self) -> int:
        return len(self.drafter.target_layer_ids) if self.drafter else 0

    @property
    def _drawn(self) -> int:
        """Rows of all trees of a step."""
        return self.config.max_requests * (1 + self.config.budget)

    @property
    def _draft_logits(self) -> int:
        if self.drafter is None:
            return 0
        rows = self.config.max_requests * self.drafter.block_size
        if self.drafter.ranks == 1:
            return 2 * rows * self.model.vocab_size * self.dtype.itemsize
        return 2 * rows * self.model.vocab_size // self.drafter.ranks * 4

    def _drawn_bytes(self, rows: int) -> int:
        return LOGITS_COPIES * rows * self.model.vocab_size * 4

    def _layer_bytes(self, rows: int) -> int:
        model, ranks = self.model, self.config.tp
        heads = model.num_attention_heads // ranks
        attention = heads * (model.qk_head_dim + 2 * model.kv_width + 2 * model.v_head_dim)
        inner = max(model.intermediate_size, model.moe_intermediate_size) // ranks
        layer = max(
            attention, 3 * inner, 3 * model.num_experts_per_tok * model.hidden_size
        )  # a row's experts: their outputs, weighed in fp32
        numbers = rows * (layer + (6 + 2 * self._taps) * model.hidden_size)
        return (numbers + self._unpacked_experts(rows)) * self.dtype.itemsize

    def _unpacked_experts(self, rows: int) -> int:
        """Numbers beside the rows' own that experts in 16 bits or more hold on a GPU: copies of the
        chosen ones' weights, or the outputs of all experts (kdray.model.moe)."""
        model = self.model
        experts = model.n_routed_experts
        if self.packed or not self.on_gpu or not model.is_moe(model.num_hidden_layers - 1):
            return 0
        inner, width = model.moe_intermediate_size // self.config.tp, model.hidden_size
        copied = experts // GATHER_COST * 3 * inner * width
        return max(copied, min(rows, DENSE_ROWS) * experts * (3 * inner + width))

    def _expanded_bytes(self) -> int:
        """A block of keys and values per head, and the attention over it (kdray.model.mla)."""
        model, rows = self.model, min(self.config.prefill_chunk, ROW_BLOCK_FUSED)
        if not self.on_gpu or rows < EXPAND_FROM_ROWS or self.config.batch_invariant:
            return 0
        heads = model.num_attention_heads // self.config.tp
        keys = key_block(heads, on_gpu=True)
        a_key = 2 * model.kv_width + heads * (2 * model.qk_head_dim + model.v_head_dim)
        a_row = heads * (2 * model.qk_head_dim + model.v_head_dim)
        held = (keys * a_key + rows * a_row) * self.dtype.itemsize
        states = 3 * rows * heads * (model.v_head_dim + 1) * 4
        scores = 2 * heads * rows * keys * 4 if self.dtype == torch.float32 else 0
        return held + states + scores
