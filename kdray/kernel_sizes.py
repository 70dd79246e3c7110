"""The sizes in which a rank's kernels are looked at before it serves: the model's own."""

from __future__ import annotations

from kdray.config import EngineConfig
from kdray.facts import EngineFacts
from kdray.kernels.selftest_inputs import DraftSizes, Sizes
from kdray.model.moe import routing_rule
from kdray.model.parallel import Shard
from kdray.model.weights import experts_stay_packed


def kernel_sizes(config: EngineConfig, facts: EngineFacts, shard: Shard) -> Sizes:
    """Of one rank, with its part of the drafter."""
    model = facts.model
    has_experts = model.is_moe(model.num_hidden_layers - 1)
    inner = model.moe_intermediate_size if has_experts else model.intermediate_size
    return Sizes(
        width=model.hidden_size,
        heads=model.num_attention_heads // shard.size,
        nope=model.qk_nope_head_dim,
        value=model.v_head_dim,
        latent=model.kv_lora_rank,
        query_latent=model.q_lora_rank or 0,
        rope=model.qk_rope_head_dim,
        vocab=model.vocab_size,
        experts=model.n_routed_experts if has_experts else 0,
        inner=inner // shard.size,
        rule=routing_rule(model) if has_experts else None,
        packed=has_experts and experts_stay_packed(model, facts.dtype, facts.device),
        dtype=facts.dtype,
        kv_row=facts.kv_row,
        page_size=config.page_size,
        draft=_draft_sizes(facts, shard.rank),
    )


def _draft_sizes(facts: EngineFacts, rank: int) -> DraftSizes | None:
    draft = facts.own_draft_config(rank)
    if draft is None:
        return None
    return DraftSizes(
        heads=draft.num_heads,
        groups=draft.num_kv_heads,
        dim=draft.head_dim,
        slots=draft.block_size,
    )
