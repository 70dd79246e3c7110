"""From what a config wishes to the facts of an engine on this machine: files and every size."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from kdray import demo
from kdray.config import EngineConfig
from kdray.core.acceptance import AcceptanceProfile
from kdray.errors import ConfigError
from kdray.kernels.cuda_invariant import takes_sizes
from kdray.kernels.cuda_trees import MAX_DEPTH
from kdray.kernels.latent_rows import FP8, RowFormat
from kdray.model.config import ModelConfig
from kdray.model.dflash_config import DFlashConfig
from kdray.model.draft_int4 import check_groups
from kdray.model.manifest import check_shard
from kdray.model.parallel import Shard
from kdray.verifier.kv_cache import KVCache

MOST_AHEAD = MAX_DEPTH + 1  # tokens a step in flight may add, in graphs
CPU_KV_BYTES = 1 << 30  # of KV pages, where nobody says how many: a host has other things to hold


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the wishes of a config came to on this machine with this model.

    num_pages       KV pages of every rank
    pages_by_room   num_pages is only the most of use: the ranks have still to find how many of them
                    their GPUs have room for (kdray.kv_room)
    draft_ranks     ranks that share the drafter: tp, or 1
    acceptance      what drafts are assumed to hit; None: it is found out
    """

    name: str
    target: Path
    drafter: Path | None
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kv_row: RowFormat
    threads: int
    max_model_len: int
    num_pages: int
    pages_by_room: bool = False
    draft_ranks: int = 1
    acceptance: AcceptanceProfile | None = None

    def draft_config(self) -> DFlashConfig | None:
        """As the drafter's folder says it; None: there is no drafter."""
        return DFlashConfig.from_folder(self.drafter) if self.drafter else None

    def own_draft_config(self, rank: int) -> DFlashConfig | None:
        """The part of it that a rank has; None: it has none."""
        draft = self.draft_config()
        if draft is None or rank >= self.draft_ranks:
            return None
        return draft.of_rank(self.draft_ranks)


def resolve(config: EngineConfig) -> EngineFacts:
    """Find the model's files and fix every size. Takes no memory.

    Raises ConfigError or CheckpointError.
    """
    target, drafter = _folders(config)
    model = ModelConfig.from_folder(target)
    check_shard(model, Shard(0, config.tp))
    draft = DFlashConfig.from_folder(drafter) if drafter else None
    device = _device(config)
    dtype = _dtype(config, device)
    kv_row = row_format(config, model, dtype)
    check_invariant(config, model, device.type, dtype)
    longest = max_model_len(config, model)
    sharing = draft_ranks(config, draft)
    own = draft.of_rank(sharing) if draft else None
    size = page_bytes(
        model, own, page_size=config.page_size, row=kv_row, dtype=dtype, device=device
    )
    pages = page_wish(config, longest, size, on_gpu=device.type == "cuda")
    return EngineFacts(
        name=config.model if config.model == "demo" else target.name,
        target=target,
        drafter=drafter,
        model=model,
        device=device,
        dtype=dtype,
        kv_row=kv_row,
        threads=config.threads or _threads(config.tp),
        max_model_len=longest,
        num_pages=pages.count,
        pages_by_room=pages.by_room,
        draft_ranks=sharing,
        acceptance=_acceptance(config, draft),
    )


def page_bytes(
    model: ModelConfig,
    draft: DFlashConfig | None,
    *,
    page_size: int,
    row: RowFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Of a KV page of page_size tokens: the target's rows, and the drafter's in dtype where a rank
    has it."""
    target = KVCache.bytes_per_page(
        num_layers=model.num_hidden_layers, page_size=page_size, row=row, device=device
    )
    return target + (page_size * draft.kv_bytes(dtype) if draft else 0)


def draft_ranks(config: EngineConfig, draft: DFlashConfig | None) -> int:
    """How many ranks share the drafter: as wished; where the wish is left open, all if they can."""
    if draft is None or config.draft_tp == 1:
        return 1
    try:
        draft.check_split(config.tp)
        if config.draft_weights != "auto":
            check_groups(draft.of_rank(config.tp))
    except ConfigError:
        if config.draft_tp is not None:
            raise
        return 1
    return config.tp


def _acceptance(config: EngineConfig, draft: DFlashConfig | None) -> AcceptanceProfile | None:
    rates = config.synthetic_acceptance
    if rates is None or config.mode == "plain":
        return None
    if draft is None:
        raise ConfigError("synthetic_acceptance wants a drafter (--drafter), or mode 'plain'")
    if not config.graphs:
        raise ConfigError("synthetic_acceptance is for rounds that run ahead; leave graphs on")
    is_tree = config.mode == "tree"  # a chain has neither siblings nor what is behind them
    siblings, off_path = (rates.siblings, rates.off_path) if is_tree else ((), 0.0)
    try:
        return AcceptanceProfile.of(rates.hits, siblings, off_path, draft.block_size - 1)
    except ValueError as error:
        raise ConfigError(f"synthetic_acceptance: {error}") from None


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


def row_format(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> RowFormat:
    kept_as = {"auto": dtype, "bf16": torch.bfloat16, "fp8": FP8}[config.kv_dtype]
    if kept_as != dtype and dtype != torch.bfloat16:
        raise ConfigError(
            f"kv_dtype {config.kv_dtype!r} is for models that run in bfloat16, and this one runs "
            "in float32; add dtype 'bfloat16' (--dtype bfloat16) or leave kv_dtype at 'auto'"
        )
    return RowFormat.of(model.kv_lora_rank, model.qk_rope_head_dim, kept_as)


def check_invariant(
    config: EngineConfig, model: ModelConfig, device: str, dtype: torch.dtype
) -> None:
    """ConfigError where batch_invariant is wished for and cannot be had."""
    if not config.batch_invariant:
        return
    kv_dtype = "fp8" if config.kv_dtype == "fp8" else str(dtype).removeprefix("torch.")
    if device != "cuda" or dtype != torch.bfloat16 or kv_dtype != "bfloat16":
        raise ConfigError(
            "batch_invariant is for models in bfloat16 on GPUs, with KV in bfloat16; this is "
            f"{str(dtype).removeprefix('torch.')} on {device} with KV in {kv_dtype}: leave it out "
            "(--batch-invariant)"
        )
    sizes = (model.kv_lora_rank, model.qk_rope_head_dim, config.page_size)
    if not takes_sizes(*sizes):
        raise ConfigError(
            "batch_invariant has no attention for {} latent, {} rope dimensions and pages of {}: "
            "multiples of 64 and 16, and a power of two; leave it out".format(*sizes)
        )


def _threads(tp: int) -> int:
    """torch threads of a rank on a CPU: one core stays free for Ray, the endpoint and the client.

    A thread too many costs far more than one too few: threads that spin for work they cannot get
    turned a 5 ms step into one of 100 ms on two busy cores. Small models gain nothing from more
    than four.
    """
    cores = os.cpu_count() or 1
    return max(1, min(4, (cores - 1) // tp))


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Raises ConfigError where more is wished for than the model has."""
    if config.max_model_len is None:
        return model.max_position_embeddings
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's "
            f"{model.max_position_embeddings} positions"
        )
    return config.max_model_len


@dataclass(frozen=True, slots=True)
class PageWish:
    """KV pages as a config wants them: `count`, or by_room as many of them as there is room for."""

    count: int
    by_room: bool = False


def page_wish(config: EngineConfig, longest: int, size: int, *, on_gpu: bool) -> PageWish:
    """Pages for max_requests of the longest kind, or as many as the memory allows.

    longest: tokens of one request at most; size: bytes of a page on rank 0, which has the most in
    one; all ranks have as many pages.
    """
    if config.num_pages is not None:
        return PageWish(config.num_pages)
    of_use = config.max_requests * pages_of_one(config, longest)
    allowed = config.kv_memory_bytes
    if allowed is None and on_gpu:
        return PageWish(of_use, by_room=True)
    affordable = (CPU_KV_BYTES if allowed is None else allowed) // size
    if affordable < 1:
        raise ConfigError(
            f"kv_memory_bytes {allowed or CPU_KV_BYTES} holds no page of {size} bytes; "
            "give more (--kv-memory), or a smaller page_size"
        )
    return PageWish(min(of_use, affordable))


def pages_of_one(config: EngineConfig, longest: int) -> int:
    """Pages that a request of `longest` tokens can touch."""
    return -(-(longest + config.budget + MOST_AHEAD) // config.page_size)


def longest_within(config: EngineConfig, pages: int) -> int:
    """Tokens of the longest request that so many pages hold."""
    return max(0, pages * config.page_size - config.budget - MOST_AHEAD)
