#!/usr/bin/env python3
"""Will it fit? What every rank's memory goes to, without a GPU and without weights.

    python jobs/plan.py --model jobs/kimi_k26 --gpu "RTX PRO 6000" --tp 8
    python jobs/plan.py --model PATH --drafter PATH --gpu "96 GiB" --tp 8 --max-requests 64

--model needs a folder with a config.json, nothing else. An engine prints the same table when it
starts, by what is found there, and takes as many KV pages as said here: all there is room for,
unless --num-pages or --kv-memory say less. Without --gpu the GPU of this machine is taken.
Exit status: 0 it fits, 1 it does not (the last line of stderr says by how much), or it cannot be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from kdray import demo
from kdray.arguments import HelpFormatter, add_engine_arguments, engine_config
from kdray.cards import Card, card_found, card_named
from kdray.config import EngineConfig
from kdray.errors import ConfigError, KdrayError
from kdray.facts import PageWish, check_invariant, max_model_len, page_wish, row_format
from kdray.kv_room import common_pages, decision
from kdray.memory_plan import GIB, MemoryPlan, Planned, fitting_ranks
from kdray.model.config import ModelConfig
from kdray.model.dflash_config import DFlashConfig
from kdray.model.manifest import check_shard
from kdray.model.parallel import Shard
from kdray.model.weight_bytes import target_bytes
from kdray.model.weights import experts_stay_packed

GPU = torch.device("cuda")
MOST_RANKS = 64


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        config = engine_config(arguments)
        card = _card(arguments.gpu, config.tp)
        planned = plan_for(config)
        wish = _wish(planned)
        if not wish.by_room:
            planned = replace(planned, num_pages=wish.count)
        plans, chosen = planned.plans(card), ""
        if wish.by_room and all(plan.fits for plan in plans):
            count = common_pages(plans, wish.count)
            chosen = f"\n{decision(plans, count)}"
            plans = [replace(plan, num_pages=count) for plan in plans]
        for plan in plans:
            print(plan.text(), end="\n\n")
        print(f"{summary(planned, plans)}{chosen}")
        if arguments.json:
            print(json.dumps({"plans": [as_json(plan) for plan in plans]}))
        refusal(planned, card, plans)
    except KdrayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--gpu", metavar="NAME|SIZE", help="'RTX PRO 6000', 'H200', '96 GiB'")
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    add_engine_arguments(parser)
    return parser.parse_args(argv)


def plan_for(config: EngineConfig) -> Planned:
    """For GPUs, by the folders' config.json alone. Raises ConfigError or CheckpointError."""
    folder = demo.target_path() if config.model == "demo" else Path(config.model)
    model = ModelConfig.from_folder(folder)
    check_shard(model, Shard(0, config.tp))
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    check_invariant(config, model, GPU.type, dtype)
    return Planned(
        config=config,
        model=model,
        drafter=_drafter(config),
        dtype=dtype,
        kv_row=row_format(config, model, dtype),
        packed=experts_stay_packed(model, dtype, GPU),
        on_gpu=True,
    )


def _wish(planned: Planned) -> PageWish:
    config = planned.config
    longest = max_model_len(config, planned.model)
    return page_wish(config, longest, planned.page_bytes(0), on_gpu=True)


def summary(planned: Planned, plans: Sequence[MemoryPlan]) -> str:
    """The figures that count, on one line."""
    first, tokens = plans[0], min(plan.pages * plan.page_size for plan in plans)
    wide = target_bytes(
        planned.model, first.ranks, planned.dtype, packed=planned.packed
    )  # as public figures count
    return (
        f"{first.ranks} x {first.card.name}: {first.weights / GIB:.1f} GiB of the target's weights "
        f"a GPU ({wide.total / GIB:.1f} GiB with routers in fp32), room for {tokens:,} tokens of KV"
    )


def refusal(planned: Planned, card: Card, plans: Sequence[MemoryPlan]) -> None:
    """ConfigError where a rank does not fit, with the tp that would do."""
    whys = [why for plan in plans if (why := plan.refusal()) is not None]
    if not whys:
        return
    enough = fitting_ranks(list(_wider(planned)), card)
    advice = f"tp {enough} fits" if enough else f"no tp up to {MOST_RANKS} fits"
    raise ConfigError(f"{whys[0]}; {advice}")


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "rank": plan.rank,
        "ranks": plan.ranks,
        "card": plan.card.name,
        "card_bytes": plan.card.total,
        "items": {item.name: item.bytes for item in plan.items},
        "room_bytes": plan.room,
        "page_bytes": plan.page_bytes,
        "pages": plan.pages,
        "num_pages": plan.num_pages,
        "tokens": plan.pages * plan.page_size,
        "fits": plan.fits,
    }


def _wider(planned: Planned) -> list[Planned]:
    """The same with more ranks, as far as they can split the model."""
    found, tp = [], planned.config.tp * 2
    while tp <= MOST_RANKS:
        try:
            check_shard(planned.model, Shard(0, tp))
        except ConfigError:
            break
        shared = 1 if planned.config.draft_tp == 1 else None
        config = replace(planned.config, tp=tp, draft_tp=shared)
        found.append(replace(planned, config=config))
        tp *= 2
    return found


def _card(name: str | None, ranks: int) -> Card:
    if name is not None:
        return card_named(name)
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU here; say which is meant: --gpu 'RTX PRO 6000'")
    return card_found(torch.device("cuda", 0), ranks)


def _drafter(config: EngineConfig) -> DFlashConfig | None:
    if config.drafter == "none" or config.mode == "plain":
        return None
    if config.drafter == "auto":
        return DFlashConfig.from_folder(demo.drafter_path()) if config.model == "demo" else None
    return DFlashConfig.from_folder(config.drafter)


if __name__ == "__main__":
    sys.exit(main())
