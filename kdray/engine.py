"""Wires one rank: from a config to a verifier, and on rank 0 to the driver above it.

Here driver and verifiers meet; neither imports the other.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kdray import demo
from kdray.config import EngineConfig
from kdray.core.budget import Speculation
from kdray.core.pages import PageAllocator
from kdray.core.plan import VerifierGroup
from kdray.core.request import Request, SamplingParams
from kdray.driver.ahead import AheadDecoder, Buckets
from kdray.driver.device_round import RoundParts
from kdray.driver.driver import Driver
from kdray.driver.running import RunningState
from kdray.driver.scheduler import Limits, Scheduler
from kdray.errors import ConfigError
from kdray.kernels.ops import Ops, load_ops
from kdray.kernels.round_ops import RoundOps, load_round_ops
from kdray.model.config import ModelConfig
from kdray.model.dflash_config import DFlashConfig
from kdray.model.drafter import DFlashDrafter, Drafter
from kdray.model.parallel import Collectives, Shard, SoloCollectives
from kdray.model.target import TargetModel
from kdray.verifier.kv_cache import KVCache
from kdray.verifier.local_group import LocalGroup
from kdray.verifier.verifier import Verifier

MakeGroup = Callable[[Verifier], VerifierGroup]

SPARE_PAGES = 1  # behind the requests' own: where the padding rows of device rounds write
PROGRESS_WIDTH = 30
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the wishes of a config came to on this machine with this model."""

    name: str
    target: Path
    drafter: Path | None
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    threads: int
    max_model_len: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Engine:
    """A driver with what its callers need to know about it."""

    facts: EngineFacts
    driver: Driver
    speculation: Speculation


def resolve(config: EngineConfig) -> EngineFacts:
    """Find the model's files and fix every size. Takes no memory.

    Raises ConfigError or CheckpointError.
    """
    target, drafter = _folders(config)
    model = ModelConfig.from_folder(target)
    device = _device(config)
    dtype = _dtype(config, device)
    max_model_len = _max_model_len(config, model)
    return EngineFacts(
        name=config.model if config.model == "demo" else target.name,
        target=target,
        drafter=drafter,
        model=model,
        device=device,
        dtype=dtype,
        threads=config.threads or _threads(config.tp),
        max_model_len=max_model_len,
        num_pages=config.num_pages or _num_pages(config, model, dtype, max_model_len),
    )


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
    shard = shard or Shard()
    model = TargetModel.load(
        facts.target,
        ops=ops,
        shard=shard,
        collectives=collectives or SoloCollectives(),
        dtype=facts.dtype,
        device=facts.device,
        norm_eps_qkv=config.norm_eps_qkv,
        taps=taps,
    )
    cache = KVCache(
        num_layers=model.num_layers,
        num_pages=facts.num_pages + SPARE_PAGES,
        page_size=config.page_size,
        width=model.kv_width,
        dtype=facts.dtype,
        device=facts.device,
    )
    return Verifier(model, cache, ops, draws=shard.rank == 0, round_ops=round_ops)


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
                 For one rank alone.
    """
    ops = load_ops(facts.device)
    shard = shard or Shard()
    if runs_ahead is None:
        runs_ahead = config.graphs and facts.device.type == "cuda" and shard.size == 1
    taps = DFlashConfig.from_folder(facts.drafter).target_layer_ids if facts.drafter else ()
    round_ops = load_round_ops(facts.device) if runs_ahead else None
    verifier = build_verifier(
        config, facts, ops, shard=shard, collectives=collectives, taps=taps, round_ops=round_ops
    )
    drafter = _load_drafter(config, facts, ops, verifier.model if shard.size == 1 else facts.target)
    if round_ops is None:
        return assemble(config, facts, ops, drafter, make_group(verifier))
    return assemble(config, facts, ops, drafter, LocalGroup(verifier), round_ops)


def assemble(
    config: EngineConfig,
    facts: EngineFacts,
    ops: Ops,
    drafter: Drafter | None,
    verifiers: VerifierGroup,
    round_ops: RoundOps | None = None,
) -> Engine:
    """The driver above a group of verifiers and a drafter (None: plain decoding).

    round_ops   for device rounds; the group is then a local one
    """
    speculation = Speculation(
        mode=config.mode if drafter else "plain",
        budget=config.budget,
        depth=drafter.depth if drafter else 0,
        candidates=config.candidates,
    )
    scheduler = Scheduler(
        limits=Limits(
            max_requests=config.max_requests,
            max_model_len=facts.max_model_len,
            prefill_chunk=config.prefill_chunk,
            vocab_size=facts.model.vocab_size,
        ),
        pages=PageAllocator(facts.num_pages, config.page_size),
        speculation=speculation,
        runs_ahead=round_ops is not None,
    )
    decoder = None
    if round_ops is not None:
        assert isinstance(verifiers, LocalGroup) and isinstance(drafter, DFlashDrafter | None)
        state = _running_state(config, facts, scheduler)
        parts = RoundParts(
            drafter=drafter,
            verifiers=verifiers,
            ops=round_ops,
            state=state,
            depth=speculation.depth,
        )
        decoder = _decoder(config, parts, speculation)
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


def _running_state(config: EngineConfig, facts: EngineFacts, scheduler: Scheduler) -> RunningState:
    return RunningState(
        slots=config.max_requests,
        pages=scheduler.pages.pages_for(scheduler.most_places),
        page_size=config.page_size,
        spare_page=facts.num_pages,
        device=facts.device,
    )


def _decoder(config: EngineConfig, parts: RoundParts, speculation: Speculation) -> AheadDecoder:
    """The device rounds of every size; on a GPU captured as CUDA graphs."""
    budget = speculation.draft_nodes(1 << 30)
    decoder = AheadDecoder(
        parts, Buckets.of(config.max_requests, budget), speculation.candidates_kept
    )
    if parts.state.slots.root.device.type == "cuda":
        start = time.perf_counter()
        taken = decoder.capture(_show_progress)
        seconds = time.perf_counter() - start
        _log.info("captured the rounds in %.1f s; they take %.0f MiB", seconds, taken / 2**20)
    return decoder


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


def _load_drafter(
    config: EngineConfig, facts: EngineFacts, ops: Ops, target: TargetModel | Path
) -> Drafter | None:
    if facts.drafter is None:
        return None
    return DFlashDrafter.load(
        facts.drafter,
        target,
        ops=ops,
        candidates=config.candidates if config.mode == "tree" else 1,
        page_size=config.page_size,
        num_pages=facts.num_pages + SPARE_PAGES,
        dtype=facts.dtype,
        device=facts.device,
    )


def _folders(config: EngineConfig) -> tuple[Path, Path | None]:
    target = demo.target_path() if config.model == "demo" else Path(config.model)
    if not target.is_dir():
        raise ConfigError(
            f"model must be 'demo' or the folder of a downloaded model; {config.model!r} is neither"
        )
    if config.drafter == "none" or config.mode == "plain":
        return target, None
    if config.drafter == "auto":
        return target, demo.drafter_path() if config.model == "demo" else None
    drafter = demo.drafter_path() if config.drafter == "demo" else Path(config.drafter)
    if not drafter.is_dir():
        raise ConfigError(
            f"drafter must be 'auto', 'none' or a DFlash folder; {config.drafter!r} is neither"
        )
    return target, drafter


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but torch sees no GPU; use 'cpu' or 'auto'")
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def _threads(tp: int) -> int:
    """torch threads of a rank on a CPU: one core stays free for Ray, the endpoint and the client.

    A thread too many costs far more than one too few: threads that spin for work they cannot get
    turned a 5 ms step into one of 100 ms on two busy cores. Small models gain nothing from more
    than four.
    """
    cores = os.cpu_count() or 1
    return max(1, min(4, (cores - 1) // tp))


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_position_embeddings
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's "
            f"{model.max_position_embeddings} positions"
        )
    return config.max_model_len


def _num_pages(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, max_model_len: int
) -> int:
    """Pages for max_requests of the longest kind, or as many as the memory allows."""
    wanted = config.max_requests * -(-(max_model_len + config.budget) // config.page_size)
    page_bytes = KVCache.bytes_per_page(
        num_layers=model.num_hidden_layers,
        page_size=config.page_size,
        width=model.kv_width,
        dtype=dtype,
    )
    affordable = config.kv_memory_bytes // page_bytes
    if affordable < 1:
        raise ConfigError(
            f"kv_memory_bytes {config.kv_memory_bytes} holds no page of {page_bytes} bytes"
        )
    return min(wanted, affordable)


def make_request(
    request_id: str, prompt: Sequence[int], sampling: SamplingParams, facts: EngineFacts
) -> Request:
    """A request with everything fixed: its seed, and the tokens that end it."""
    own = frozenset() if sampling.ignore_eos else facts.model.eos_token_ids
    return Request(
        request_id=request_id,
        prompt=tuple(prompt),
        sampling=sampling,
        end_token_ids=own | frozenset(sampling.stop_token_ids),
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
    )
