"""One rank of a target of Kimi K2.6's shape on its GPU: its shard, its KV, its drafter's part."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import KIMI, read_config
from step_ranks import Loopback
from step_tables import LonelyTables, fill, whole_tables
from torch import Tensor

from kdray.config import EngineConfig
from kdray.engine import round_sizes
from kdray.engine_rounds import step_passes
from kdray.facts import EngineFacts
from kdray.kernels.ops import LiveRows, Ops, RoutingRule, load_ops
from kdray.kernels.round_ops import RoundOps, load_round_ops
from kdray.memory_plan import SPARE_PAGES, plan_of_start
from kdray.model.dflash import DFlashNetwork
from kdray.model.dflash_config import DFlashConfig, default_target_layer_ids
from kdray.model.dflash_weights import load_weights
from kdray.model.draft_int4 import mlp_form
from kdray.model.drafter import DFlashDrafter, check_fits
from kdray.model.dummy_weights import Noise
from kdray.model.parallel import Collectives, Shard, SoloCollectives
from kdray.model.target import TargetModel
from kdray.model.target_tables import SplitTables, Vocabulary
from kdray.verifier.kv_cache import KVCache
from kdray.verifier.verifier import Verifier

# Everything small, and still split by eight: 32 inputs a rank of an expert's second product.
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 256,
    "num_attention_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "q_lora_rank": 24,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
MOST_RANKS = 8
TINY_DRAFTER = {
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "num_hidden_layers": 2,
}  # fmt: skip


class WatchedOps:
    """Another's ops, which also tell what the routers chose while `watch` is open."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._chosen: list[Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def route_experts(
        self, logits: Tensor, bias: Tensor, rule: RoutingRule, live: LiveRows | None = None
    ) -> tuple[Tensor, Tensor]:
        expert, weight = self._ops.route_experts(logits, bias, rule, live)
        if self._chosen is not None:
            self._chosen.append(expert)
        return expert, weight

    @contextmanager
    def watch(self) -> Iterator[list[Tensor]]:
        """What every router chose meanwhile, [T, k] each, in the order of the layers."""
        self._chosen = []
        try:
            yield self._chosen
        finally:
            self._chosen = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Rank:
    """All that is timed. drafter: the rank's part; None where rank 0 drafts alone and this is
    another. depth, candidates: of its blocks."""

    config: EngineConfig
    facts: EngineFacts
    shard: Shard
    collectives: Collectives
    ops: WatchedOps
    round_ops: RoundOps
    verifier: Verifier
    drafter: DFlashDrafter | None
    depth: int
    candidates: int

    @property
    def device(self) -> torch.device:
        return self.facts.device

    @property
    def model(self) -> TargetModel:
        return self.verifier.model

    @property
    def num_tokens(self) -> int:
        """Token ids that rows are drawn from: those that rank 0 embeds, with others or alone."""
        return self.facts.model.vocab_size // self.shard.size


class SetUp:
    """Prints what takes the time before the first row."""

    def __init__(self, device: torch.device, *, speaks: bool) -> None:
        self._device = device
        self._speaks = speaks
        self._start = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.say(f"{name}: {now - start:.1f} s, {now - self._start:.1f} in all{self._memory()}")

    def say(self, line: str) -> None:
        if self._speaks:
            print(f"set-up  {line}", flush=True)

    def _memory(self) -> str:
        if self._device.type != "cuda":
            return ""
        return f", {torch.cuda.memory_allocated(self._device) / 2**30:.1f} GiB held"


def write_folders(root: Path, *, layers: int | None, tiny: bool) -> tuple[Path, Path]:
    """config.json of the target and of its drafter, and nothing else."""
    changes: dict[str, int] = dict(TINY) if tiny else {}
    if layers is not None:
        changes["num_hidden_layers"] = layers
    fields = read_config(KIMI, ",".join(f"{name}={value}" for name, value in changes.items()))
    draft = json.loads((KIMI / "drafter" / "config.json").read_text())
    text = fields["text_config"]
    mask = min(draft["dflash_config"]["mask_token_id"], text["vocab_size"] // MOST_RANKS - 2)
    draft["dflash_config"]["mask_token_id"] = mask  # rank 0 embeds it, with others or alone
    if changes:
        draft |= TINY_DRAFTER if tiny else {}
        shared = ("hidden_size", "vocab_size", "intermediate_size")
        draft |= {name: text[name] for name in shared}
        layers = text["num_hidden_layers"]
        taps = default_target_layer_ids(max(layers, 4), draft["num_hidden_layers"])
        draft["num_target_layers"] = layers
        draft["dflash_config"] = {
            "mask_token_id": mask,
            # As many as there are layers may coincide, and each is read for itself.
            "target_layer_ids": [min(tap, layers - 1) for tap in taps],
        }
    target, drafter = root / "target", root / "drafter"
    for folder, content in ((target, fields), (drafter, draft)):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(content))
    return target, drafter


def build_rank(
    config: EngineConfig,
    facts: EngineFacts,
    shard: Shard,
    collectives: Collectives,
    set_up: SetUp,
) -> Rank:
    """By the product's own classes; ConfigError where the memory plan says no."""
    assert facts.drafter is not None, "a drafter is always given"
    device, plan = facts.device, plan_of_start(config, facts, shard.rank)
    set_up.say("\n" + plan.text())
    plan.check()
    draft = DFlashConfig.from_folder(facts.drafter)
    ops = WatchedOps(load_ops(device, batch_invariant=config.batch_invariant))
    round_ops = load_round_ops(device)
    with set_up.part(f"weights of rank {shard.rank} of {shard.size}"):
        model = TargetModel.load(
            facts.target,
            ops=ops,  # type: ignore[arg-type]
            shard=shard,
            collectives=collectives,
            dtype=facts.dtype,
            device=device,
            taps=draft.target_layer_ids,
            load_format="dummy",
        )
    noise = Noise(device)
    with set_up.part("KV pages"):
        cache = KVCache(
            num_layers=model.num_layers,
            num_pages=facts.num_pages + SPARE_PAGES,
            page_size=config.page_size,
            row=facts.kv_row,
            device=device,
        )
        fill(cache.rows, noise)
    verifier = Verifier(model, cache, ops, draws=shard.rank == 0, round_ops=round_ops)  # type: ignore[arg-type]
    drafter = None
    if shard.rank < facts.draft_ranks:
        with set_up.part("drafter, its KV pages, the target's tables"):
            drafter = _drafter(config, facts, draft, model, ops, noise)
    return Rank(
        config=config,
        facts=facts,
        shard=shard,
        collectives=collectives,
        ops=ops,
        round_ops=round_ops,
        verifier=verifier,
        drafter=drafter,
        depth=draft.block_size - 1,
        candidates=config.candidates,
    )


def _drafter(
    config: EngineConfig,
    facts: EngineFacts,
    draft: DFlashConfig,
    model: TargetModel,
    ops: WatchedOps,
    noise: Noise,
) -> DFlashDrafter:
    assert facts.drafter is not None, "a drafter is always given"
    check_fits(draft, facts.model, facts.drafter)
    form = mlp_form(config.draft_weights, facts.dtype, facts.device)
    shard, collectives = model.shard, model.collectives
    if facts.draft_ranks == 1:
        shard, collectives = Shard(), SoloCollectives()
    weights = load_weights(facts.drafter, draft, facts.dtype, facts.device, form, "dummy", shard)
    own = draft.of_rank(shard.size)
    network = DFlashNetwork(own, weights, ops, shard, collectives)  # type: ignore[arg-type]
    drafter = DFlashDrafter(
        network,
        _tables(model, facts),
        ops=ops,  # type: ignore[arg-type]
        candidates=config.candidates,
        page_size=config.page_size,
        num_pages=facts.num_pages + SPARE_PAGES,
    )
    fill(drafter.cache, noise)
    return drafter


def _tables(model: TargetModel, facts: EngineFacts) -> Vocabulary:
    if facts.draft_ranks == 1:
        return whole_tables(model, facts.target)
    return LonelyTables(model) if isinstance(model.collectives, Loopback) else SplitTables(model)


def with_passes(rank: Rank, config: EngineConfig) -> Verifier:
    """The rank's verifier as an engine of that config has it, with passes, where it has any; they
    are not captured yet."""
    own, facts = rank.verifier, rank.facts
    passes = step_passes(config, facts, own.model, own.cache, round_sizes(config, facts))
    draws = rank.shard.rank == 0
    return Verifier(
        own.model, own.cache, rank.ops, draws=draws, round_ops=rank.round_ops, passes=passes  # type: ignore[arg-type]
    )  # fmt: skip


@contextmanager
def temporary_folders(*, layers: int | None, tiny: bool) -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="kdray-step-") as home:
        yield write_folders(Path(home), layers=layers, tiny=tiny)
