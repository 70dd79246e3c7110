"""Wires one rank: from a config to a verifier, and on rank 0 to the driver above it.

Here driver and verifiers meet; neither imports the other.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kdray.config import EngineConfig
from kdray.core.budget import Speculation
from kdray.core.pages import PageAllocator
from kdray.core.plan import VerifierGroup
from kdray.core.request import Request, SamplingParams
from kdray.driver.device_round import RoundParts
from kdray.driver.driver import Driver
from kdray.driver.running import RunningState, on_device
from kdray.driver.scheduler import Limits, Scheduler
from kdray.engine_drafter import leading_drafter, load_drafter
from kdray.engine_rounds import (
    RoundSizes,
    ahead_decoder,
    can_run_ahead,
    capture_passes,
    follower_rounds,
    step_passes,
)
from kdray.errors import InvalidRequest
from kdray.facts import EngineFacts, resolve
from kdray.kernel_sizes import kernel_sizes
from kdray.kernels.graphs import shared_pool
from kdray.kernels.ops import Ops, load_ops
from kdray.kernels.round_ops import RoundOps, load_round_ops
from kdray.kernels.selftest import check_kernels
from kdray.kv_room import settle_pages
from kdray.memory_plan import SPARE_PAGES
from kdray.model.drafter import DFlashDrafter, Drafter
from kdray.model.parallel import Collectives, Shard, SoloCollectives
from kdray.model.synthetic_drafter import SyntheticDrafter
from kdray.model.target import TargetModel
from kdray.verifier.follower import FollowerRounds
from kdray.verifier.kv_cache import KVCache
from kdray.verifier.local_group import LocalGroup
from kdray.verifier.rank_group import RankGroup
from kdray.verifier.shared_drafter import SharedDrafter
from kdray.verifier.synthetic import SyntheticVerifier
from kdray.verifier.verifier import Verifier

__all__ = [
    "Engine",
    "EngineFacts",
    "Follower",
    "assemble",
    "build_engine",
    "build_follower",
    "build_verifier",
    "make_request",
    "resolve",
    "round_sizes",
]

MakeGroup = Callable[[Verifier], VerifierGroup]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A driver with what its callers need to know about it."""

    facts: EngineFacts
    driver: Driver
    speculation: Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """What a rank beside 0 has. drafter: None where rank 0 drafts alone; rounds: None where no
    rank runs ahead."""

    verifier: Verifier
    drafter: DFlashDrafter | None
    rounds: FollowerRounds | None


def build_verifier(
    config: EngineConfig,
    facts: EngineFacts,
    ops: Ops,
    *,
    shard: Shard | None = None,
    collectives: Collectives | None = None,
    taps: tuple[int, ...] = (),
    round_ops: RoundOps | None = None,
) -> Verifier:
    """This rank's shard of the target with an empty cache.

    round_ops: for device rounds, whose padding writes to a page of its own behind the others.
    """
    assert not facts.pages_by_room, "the ranks settle their pages first (kdray.kv_room)"
    shard = shard or Shard()
    _check_kernels(config, facts, shard, with_rounds=round_ops is not None)
    model = TargetModel.load(
        facts.target,
        ops=ops,
        shard=shard,
        collectives=collectives or SoloCollectives(),
        dtype=facts.dtype,
        device=facts.device,
        norm_eps_qkv=config.norm_eps_qkv,
        taps=taps,
        load_format=config.load_format,
    )
    cache = KVCache(
        num_layers=model.num_layers,
        num_pages=facts.num_pages + SPARE_PAGES,
        page_size=config.page_size,
        row=facts.kv_row,
        device=facts.device,
    )
    passes = None
    if round_ops is not None:
        passes = step_passes(config, facts, model, cache, round_sizes(config, facts))
    draws, profile = shard.rank == 0, facts.acceptance
    if profile is None:
        return Verifier(model, cache, ops, draws=draws, round_ops=round_ops, passes=passes)
    return SyntheticVerifier(
        model, cache, ops, profile=profile, draws=draws, round_ops=round_ops, passes=passes
    )


def _ops(config: EngineConfig, facts: EngineFacts) -> Ops:
    return load_ops(facts.device, batch_invariant=config.batch_invariant)


def _check_kernels(
    config: EngineConfig, facts: EngineFacts, shard: Shard, *, with_rounds: bool
) -> None:
    """KernelError where a kernel is wrong on this card. By ops of its own, which keep nothing."""
    if facts.device.type == "cuda":
        start = time.perf_counter()
        with on_device(facts.device):
            rounds = load_round_ops(facts.device) if with_rounds else None
            sizes = kernel_sizes(config, facts, shard)
            check_kernels(_ops(config, facts), rounds, sizes, facts.device)
        _log.info("every kernel is right on this card: %.1f s", time.perf_counter() - start)


def build_engine(
    config: EngineConfig,
    facts: EngineFacts,
    *,
    shard: Shard | None = None,
    collectives: Collectives | None = None,
    make_group: MakeGroup = LocalGroup,
    runs_ahead: bool | None = None,
) -> Engine:
    """Rank 0: the drafter, its own verifier, the group around it, the driver above.

    runs_ahead   decode in device rounds, ahead of the host; None: where they can be CUDA graphs.
                 All ranks decide alike (build_follower).
    """
    facts = settle_pages(config, facts, shard, collectives)
    ops = _ops(config, facts)
    shard = shard or Shard()
    if config.load_format == "dummy":
        _log.warning("dummy weights: %s runs on random numbers, its text means nothing", facts.name)
    draft = facts.draft_config()
    taps = draft.target_layer_ids if draft else ()
    if runs_ahead is None:
        runs_ahead = can_run_ahead(config, facts)
    round_ops = load_round_ops(facts.device) if runs_ahead else None
    verifier = build_verifier(
        config, facts, ops, shard=shard, collectives=collectives, taps=taps, round_ops=round_ops
    )
    part = load_drafter(config, facts, ops, verifier.model)
    pool = shared_pool(facts.device)
    capture_passes(verifier, facts.device, pool)
    group = make_group(verifier)
    drafter = leading_drafter(facts, part, group)
    return assemble(config, facts, ops, drafter, group, round_ops, pool)


def build_follower(
    config: EngineConfig,
    facts: EngineFacts,
    *,
    shard: Shard,
    collectives: Collectives,
    runs_ahead: bool | None = None,
) -> Follower:
    """Any other rank: its verifier, its part of a shared drafter and, where rank 0 runs ahead, its
    side of the device rounds.

    On GPUs it records its graphs here, which ends when rank 0 records its own.
    """
    facts = settle_pages(config, facts, shard, collectives)
    if runs_ahead is None:
        runs_ahead = can_run_ahead(config, facts)
    round_ops = load_round_ops(facts.device) if runs_ahead else None
    ops = _ops(config, facts)
    draft = facts.draft_config() if config.mode != "plain" else None
    is_shared = facts.draft_ranks > 1
    taps = draft.target_layer_ids if draft and is_shared else ()
    verifier = build_verifier(
        config, facts, ops, shard=shard, collectives=collectives, taps=taps, round_ops=round_ops
    )
    drafter = load_drafter(config, facts, ops, verifier.model) if is_shared else None
    if round_ops is None:
        return Follower(verifier=verifier, drafter=drafter, rounds=None)
    pool, sizes = shared_pool(facts.device), round_sizes(config, facts)
    capture_passes(verifier, facts.device, pool)
    rounds = follower_rounds(verifier, collectives, round_ops, sizes, facts.device, drafter, pool)
    return Follower(verifier=verifier, drafter=drafter, rounds=rounds)


def assemble(
    config: EngineConfig,
    facts: EngineFacts,
    ops: Ops,
    drafter: Drafter | None,
    verifiers: VerifierGroup,
    round_ops: RoundOps | None = None,
    pool: Any = None,
) -> Engine:
    """The driver above a group of verifiers and a drafter (None: plain decoding).

    round_ops   for device rounds; the group and the drafter then take part in them
    pool        for their graphs (kernels.graphs.shared_pool); None: one of their own
    """
    if facts.acceptance is not None:
        _log.warning("synthetic acceptance: drafts hold by chance, the text is not the model's")
    speculation = _speculation(config, drafter.depth if drafter else None)
    scheduler = _scheduler(config, facts, speculation, runs_ahead=round_ops is not None)
    decoder = None
    if round_ops is not None:
        assert isinstance(verifiers, LocalGroup | RankGroup)
        assert isinstance(drafter, DFlashDrafter | SyntheticDrafter | SharedDrafter | None)
        sizes = RoundSizes.of(scheduler, speculation)
        parts = RoundParts(
            drafter=drafter,
            verifiers=verifiers,
            ops=round_ops,
            state=RunningState(sizes.page_tables(facts.device)),
            depth=sizes.depth,
        )
        decoder = ahead_decoder(
            parts, sizes, speculation.candidates_kept, pool or shared_pool(facts.device)
        )
    driver = Driver(
        verifiers=verifiers,
        drafter=drafter,
        ops=ops,
        scheduler=scheduler,
        speculation=speculation,
        device=facts.device,
        decoder=decoder,
    )
    return Engine(facts=facts, driver=driver, speculation=speculation)


def round_sizes(config: EngineConfig, facts: EngineFacts) -> RoundSizes:
    """What the device rounds of an engine are made for; the same on all ranks."""
    draft = facts.draft_config() if config.mode != "plain" else None
    speculation = _speculation(config, draft.block_size - 1 if draft else None)
    return RoundSizes.of(_scheduler(config, facts, speculation, runs_ahead=True), speculation)


def _speculation(config: EngineConfig, depth: int | None) -> Speculation:
    """depth: of the drafter's blocks; None: there is no drafter."""
    return Speculation(
        mode="plain" if depth is None else config.mode,
        budget=config.budget,
        depth=depth or 0,
        candidates=config.candidates,
    )


def _scheduler(
    config: EngineConfig, facts: EngineFacts, speculation: Speculation, *, runs_ahead: bool
) -> Scheduler:
    return Scheduler(
        limits=Limits(
            max_requests=config.max_requests,
            max_model_len=facts.max_model_len,
            prefill_chunk=config.prefill_chunk,
            vocab_size=facts.model.vocab_size,
        ),
        pages=PageAllocator(facts.num_pages, config.page_size),
        speculation=speculation,
        runs_ahead=runs_ahead,
    )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    facts: EngineFacts,
    delivered: Sequence[int] = (),
) -> Request:
    """A request with everything fixed: its seed, and the tokens that end it.

    delivered   output that an engine before this one gave already; the request goes on behind it,
                and needs the seed that it had there
    """
    own = frozenset() if sampling.ignore_eos else facts.model.eos_token_ids
    if len(delivered) >= sampling.max_tokens:
        raise InvalidRequest(
            f"{len(delivered)} tokens were delivered of max_tokens {sampling.max_tokens}; "
            "nothing is left to run",
            param="max_tokens",
        )
    return Request(
        request_id=request_id,
        prompt=tuple(prompt),
        sampling=sampling,
        end_token_ids=own | frozenset(sampling.stop_token_ids),
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        tokens=[*prompt, *delivered],
    )
