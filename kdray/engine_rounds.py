"""An engine's device rounds: whether it has any, their sizes, and on GPUs their CUDA graphs."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from kdray.config import EngineConfig
from kdray.core.buckets import Buckets
from kdray.core.budget import Speculation
from kdray.driver.ahead import AheadDecoder
from kdray.driver.device_round import RoundParts
from kdray.driver.running import on_device
from kdray.driver.scheduler import Scheduler
from kdray.errors import ConfigError
from kdray.facts import EngineFacts
from kdray.kernels.cuda_attention import takes_sizes
from kdray.kernels.cuda_round import beyond_kernels
from kdray.kernels.page_tables import PageTables
from kdray.kernels.round_ops import RoundOps
from kdray.model.drafter import DeviceDrafter
from kdray.model.parallel import Collectives
from kdray.model.target import TargetModel
from kdray.verifier.follower import FollowerRounds
from kdray.verifier.kv_cache import KVCache
from kdray.verifier.step_passes import StepPasses
from kdray.verifier.verifier import Verifier

PROGRESS_WIDTH = 30
MIB = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSizes:
    """What the rounds of every rank are made for.

    depth        of a tree at most
    slots        requests at the same time
    pages        of one of them at most
    spare_page   where padding writes, behind the requests' own
    """

    buckets: Buckets
    depth: int
    slots: int
    pages: int
    page_size: int
    spare_page: int

    @classmethod
    def of(cls, scheduler: Scheduler, speculation: Speculation) -> RoundSizes:
        slots = scheduler.limits.max_requests
        return cls(
            buckets=Buckets.of(slots, speculation.draft_nodes(1 << 30)),
            depth=speculation.depth,
            slots=slots,
            pages=scheduler.pages.pages_for(scheduler.most_places),
            page_size=scheduler.pages.page_size,
            spare_page=scheduler.pages.num_pages,
        )

    def page_tables(self, device: torch.device) -> PageTables:
        return PageTables(
            slots=self.slots,
            pages=self.pages,
            page_size=self.page_size,
            spare_page=self.spare_page,
            device=device,
        )


def can_run_ahead(config: EngineConfig, facts: EngineFacts) -> bool:
    """Where device rounds can be CUDA graphs, and wherever acceptance is synthetic, which knows no
    other. Every rank finds the same."""
    if not config.graphs or facts.device.type != "cuda":
        return facts.acceptance is not None
    draft = facts.draft_config()
    reason = beyond_kernels(
        vocab=facts.model.vocab_size,
        depth=draft.block_size - 1 if draft else 0,
        page_size=config.page_size,
    )
    if reason is not None and facts.acceptance is not None:
        raise ConfigError(f"synthetic_acceptance wants rounds in CUDA graphs: {reason}")
    if reason is not None:
        _log.warning("no CUDA graphs for this model, every step comes from the host: %s", reason)
    return reason is None


def step_passes(
    config: EngineConfig, facts: EngineFacts, model: TargetModel, cache: KVCache, sizes: RoundSizes
) -> StepPasses | None:
    """A rank's passes over planned steps; None where a graph could not hold them."""
    latent, rope = facts.model.kv_lora_rank, facts.model.qk_rope_head_dim
    if facts.device.type == "cuda" and not takes_sizes(
        facts.dtype, latent, rope, config.page_size, facts.kv_row.is_fp8
    ):
        return None  # what serves such sizes reads the batch on the host
    return StepPasses(
        model,
        cache,
        prefill_chunk=config.prefill_chunk,
        requests=sizes.slots,
        most_nodes=sizes.buckets.num_nodes[-1],
        pages=sizes.pages,
        spare_slot=sizes.spare_page * sizes.page_size,
    )


def capture_passes(verifier: Verifier, device: torch.device, pool: Any) -> None:
    """On GPUs, while every other rank does so; pool: kernels.graphs.shared_pool."""
    if verifier.passes is None or device.type != "cuda":
        return
    start = time.perf_counter()
    with on_device(device):
        taken = verifier.passes.capture(pool)
    seconds = time.perf_counter() - start
    _log.info(
        "captured the passes of planned steps in %.1f s; they take %.0f MiB", seconds, taken / MIB
    )


def ahead_decoder(parts: RoundParts, sizes: RoundSizes, candidates: int, pool: Any) -> AheadDecoder:
    """Rank 0's rounds, of `candidates` at every depth of a tree; on a GPU captured."""
    decoder = AheadDecoder(parts, sizes.buckets, candidates)
    device = parts.state.slots.root.device
    if device.type == "cuda":
        start = time.perf_counter()
        with on_device(device):
            taken = decoder.capture(pool, _show_progress)
        seconds = time.perf_counter() - start
        free, total = torch.cuda.mem_get_info(device)
        _log.info("captured the rounds in %.1f s; they take %.0f MiB", seconds, taken / MIB)
        _log.info("%.2f GiB of the card's %.2f are free now", free / 2**30, total / 2**30)
    return decoder


def follower_rounds(
    verifier: Verifier,
    collectives: Collectives,
    ops: RoundOps,
    sizes: RoundSizes,
    device: torch.device,
    drafter: DeviceDrafter | None,
    pool: Any,
) -> FollowerRounds:
    """Any other rank's; on a GPU captured, which ends when rank 0 has captured its own."""
    tables = sizes.page_tables(device)
    rounds = FollowerRounds(
        verifier,
        collectives,
        tables,
        ops,
        buckets=sizes.buckets,
        depth=sizes.depth,
        drafter=drafter,
    )
    if device.type == "cuda":
        with on_device(device):
            rounds.capture(pool)
    return rounds


def _show_progress(done: int, total: int) -> None:
    """A bar on a terminal; elsewhere the log's line at the end is enough."""
    if sys.stderr.isatty():
        bar = "#" * (PROGRESS_WIDTH * done // total)
        end = "\n" if done == total else ""
        print(
            f"\rcapturing CUDA graphs [{bar:<{PROGRESS_WIDTH}}] {done}/{total}",
            end=end,
            file=sys.stderr,
            flush=True,
        )
