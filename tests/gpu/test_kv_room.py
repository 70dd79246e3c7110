"""An engine that takes all the room there is on a card stays within it."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from jobs import make_checkpoint
from kdray import LLM, EngineConfig, SamplingParams, kv_room
from kdray.cards import Card, card_found
from kdray.engine import EngineFacts, resolve
from kdray.memory_plan import GIB, MIB, SPARE_PAGES, MemoryPlan, planned_start

pytestmark = pytest.mark.gpu

ROOM = 64 * MIB  # for pages
# What torch rounds up by, and cuBLAS's workspaces, which torch holds and the plan counts with the
# context: 330 MiB of the demo's on an H200, where a sixth of the reserve covers them.
SLACK = 512 * MIB
WIDER = (
    "hidden_size=512,moe_intermediate_size=256,intermediate_size=1024,n_routed_experts=64,"
    "vocab_size=8192,num_attention_heads=8,q_lora_rank=256,kv_lora_rank=128,qk_nope_head_dim=64,"
    "qk_rope_head_dim=16,v_head_dim=64,num_hidden_layers=4"
)


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("wider")
    assert make_checkpoint.main(["--out", str(path), "--config-only", "--set", WIDER]) == 0
    return str(path)


def small_card(config: EngineConfig, facts: EngineFacts) -> Card:
    """What is taken here is taken there, and ROOM is left for pages."""
    card = Card("a small card", 64 * GIB, card_found(facts.device, 1).taken)
    fixed = planned_start(config, facts).plan(0, card).fixed
    return replace(card, total=fixed + ROOM)  # the reserve is the same on any card so small


def counted(plan: MemoryPlan) -> int:
    """Bytes that torch holds for an engine, by its plan."""
    beside = ("context", "reserve")
    held = (i.bytes for i in plan.items if not i.is_part and not i.name.startswith(beside))
    return sum(held) + (plan.pages + SPARE_PAGES) * plan.page_bytes


@pytest.mark.parametrize("kind", ["demo", "packed", "unpacked", "batch invariant"])
def test_the_peak_is_within_the_plan(
    device: torch.device, wider: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = {} if kind == "demo" else {"model": wider, "load_format": "dummy"}
    config = EngineConfig(
        device="cuda",
        dtype="float32" if kind == "unpacked" else "bfloat16",
        max_requests=24,
        budget=24,
        prefill_chunk=1024,
        batch_invariant=kind == "batch invariant",
        **model,  # type: ignore[arg-type]
    )
    facts = resolve(config)
    assert facts.pages_by_room
    gc.collect()
    torch.cuda.empty_cache()
    card = small_card(config, facts)
    monkeypatch.setattr(kv_room, "card_found", lambda *_: card)
    before = torch.cuda.memory_reserved(device)
    with LLM(config) as llm:
        plan = planned_start(config, facts).plan(0, card)
        assert llm.facts.num_pages == plan.pages == llm.driver.scheduler.pages.num_pages
        assert ROOM - 2 * plan.page_bytes < plan.pages * plan.page_bytes < ROOM
        torch.cuda.empty_cache()  # what the self-test and loading left
        torch.cuda.reset_peak_memory_stats(device)
        prompts = [[3 + (7 * n + i) % 90 for i in range(300 + 60 * n)] for n in range(25)]
        completions = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
        assert all(len(completion.token_ids) == 24 for completion in completions)
        penalised = SamplingParams(max_tokens=8, ignore_eos=True, presence_penalty=0.5)
        llm.generate(prompts[:24], penalised)  # steps from the host, logits of all trees
        peak = torch.cuda.max_memory_reserved(device) - before
    assert peak < counted(plan) + SLACK
    free, total = torch.cuda.mem_get_info(device)
    assert total - free < card.total
