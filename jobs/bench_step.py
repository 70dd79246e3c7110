#!/usr/bin/env python3
"""A verify step of Kimi K2.6 at its full size, on one of eight ranks: what it takes, and why.

    python jobs/bench_step.py --out benchmarks/results
    python jobs/bench_step.py --parts step --tokens 1 8 --contexts 0
    python jobs/bench_step.py --tp 2 --ranks 2 --layers 12 --tokens 1 8 64
    python jobs/bench_step.py --device cpu --tiny --layers 2

Rank 0's real shard of TP-8 (61 layers, full widths) and its part of the drafter (--draft-tp), dummy
weights made on the GPU (--load-format dummy), in the product's own classes. With --ranks 1, the
default, the other ranks are looked for in the rank itself: all but the collectives is timed.
--ranks N, equal to --tp, runs N processes over N GPUs; rows are rank 0's, and nothing is predicted
or run as an engine.

step     verify of trees in a CUDA graph, of prompts launched kernel by kernel and as captured
         passes (step_rows.py says which rows are whose). ms, the floor (step_floor.py), fraction =
         floor / ms, distinct experts a layer. Over N GPUs also local_ms, the same step without
         collectives, and what they take of ms, waiting for others included: travel_ms, travel_share
ops      the same steps once more, profiled: milliseconds by op, over N GPUs `collectives` too
draft    drafting alone, one block a request, where their contexts fit the KV pages
round    the captured round and its verbs: draft, build, verify, accept, commit
engine   a whole engine on this shard: prompts read, captured rounds run ahead of the host
predict  tokens a second of tree, chain and plain, here and on 8 RTX PRO 6000, from the rounds and
         an assumed acceptance (step_predict.py has the formula and its sources)

A row that fails is told, the others run; the job then ends with 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import step_predict
import torch
from record import Record
from step_floor import Ceilings
from step_parts import PARTS, Bench, finish, run_parts
from step_rank import SetUp, build_rank, temporary_folders
from step_ranks import alone, meet, ranks_beside
from step_rounds import engine_size
from step_rows import WAYS
from step_travel import Mutable

from kdray.arguments import HelpFormatter
from kdray.config import EngineConfig
from kdray.core.acceptance import AcceptanceProfile
from kdray.errors import KdrayError
from kdray.facts import resolve
from kdray.model.manifest import check_shard
from kdray.model.parallel import Shard
from kdray.verifier.collectives import TorchCollectives

TOKENS = [1, 4, 8, 9, 16, 17, 32, 33, 64, 128, 512, 2048]
CONTEXTS = [0, 8192, 32768]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        with temporary_folders(layers=arguments.layers, tiny=arguments.tiny) as folders:
            config = config_of(arguments, *folders)
            if arguments.ranks == 1:
                return run(arguments, config, Shard(0, arguments.tp), None)
            with ranks_beside(arguments.ranks, be_rank, arguments, config) as port:
                return be_rank(0, port, arguments, config)
    except KdrayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--tokens", type=int, nargs="+", default=TOKENS, help="rows of a step")
    add("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens cached, a request")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--layers", type=int, help="of the target; all 61 if not given")
    add("--tiny", action="store_true", help="small widths, for machines without a GPU")
    add("--tp", type=int, default=8, help="ranks that the model is split over")
    add("--ranks", type=int, default=1, help="that run: 1 (the others looked for in it) or --tp")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--kv-dtype", choices=["auto", "bf16", "fp8"], default="auto", help="of the latent cache")
    add("--draft-weights", choices=["auto", "int4"], default="auto", help="of the drafter's MLPs")
    add(
        "--draft-tp",
        type=int,
        help="ranks that share the drafter: --tp or 1 (default: as an engine)",
    )
    add("--kv-tokens", type=int, default=300_000, help="that the KV pages hold")
    add("--page-size", type=int, default=64)
    add("--batch-invariant", action="store_true", help="a row's bits, whatever shares its step")
    add("--replays", type=int, default=12, help="timed runs of a row, at most")
    add("--streams", type=int, nargs="+", default=[1, 128], help="requests of a round")
    add("--drafts", type=int, nargs="+", default=[3, 7, 15], help="draft nodes of a round's trees")
    add("--round-context", type=int, default=512, help="tokens cached in rounds, a request")
    add("--round", default="1x15", metavar="REQUESTSxDRAFTS", help="what the engine runs")
    add("--seconds", type=float, default=180, help="after which no row is begun")
    add("--hit-rates", type=float, nargs="+", default=list(step_predict.HITS), metavar="RATE",
        help="of the drafter's first token, depth by depth (step_predict.py)")  # fmt: skip
    add("--sibling-rates", type=float, nargs="*", default=list(step_predict.SIBLINGS),
        metavar="RATE", help="of its second, third, .. token where the first is wrong")  # fmt: skip
    add("--off-path", type=float, default=step_predict.OFF_PATH, help="of its first behind those")
    add("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    try:
        rates = (arguments.hit_rates, arguments.sibling_rates, arguments.off_path)
        AcceptanceProfile.of(*rates, depth=len(arguments.hit_rates))
    except ValueError as error:
        parser.error(f"--hit-rates, --sibling-rates and --off-path: {error}")
    if arguments.ranks not in (1, arguments.tp):
        parser.error(f"--ranks must be 1 or --tp {arguments.tp}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --tiny runs the same on a CPU")
    return arguments


def config_of(arguments: argparse.Namespace, target: Path, drafter: Path) -> EngineConfig:
    requests, drafts = engine_size(arguments.round)
    return EngineConfig(
        model=str(target),
        drafter=str(drafter),
        tp=arguments.tp,
        device=arguments.device,
        kv_dtype=arguments.kv_dtype,
        draft_weights=arguments.draft_weights,
        draft_tp=arguments.draft_tp,
        batch_invariant=arguments.batch_invariant,
        mode="tree",
        budget=drafts,
        max_requests=requests,
        max_model_len=max([*arguments.contexts, arguments.round_context]) + 4096,
        prefill_chunk=max(512, *arguments.tokens),
        page_size=arguments.page_size,
        num_pages=-(-arguments.kv_tokens // arguments.page_size),
    )


def be_rank(rank: int, port: int, arguments: argparse.Namespace, config: EngineConfig) -> int:
    shard = Shard(rank, arguments.tp)
    return run(arguments, config, shard, partial(meet, rank, shard.size, port, config))


def run(
    arguments: argparse.Namespace,
    config: EngineConfig,
    shard: Shard,
    met: Callable[[torch.device], TorchCollectives] | None,
) -> int:
    """One rank's part. met: how the ranks meet; None: there is one."""
    start = time.perf_counter()
    if arguments.device == "cuda":
        torch.cuda.set_device(0)  # step_ranks.py shows ranks beside their own alone
    facts = resolve(config)
    check_shard(facts.model, shard)
    leads = shard.rank == 0
    set_up = SetUp(facts.device, speaks=leads)
    with set_up.part("the device's copy and matmul speed"):
        ceilings = Ceilings.measured(facts.device)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    set_up.say(
        f"copy {ceilings.bytes_per_us / 1e6:.3f} TB/s, "
        f"bf16 matmul {ceilings.flops_per_us / 1e6:.1f} TFLOP/s"
    )
    with set_up.part("collectives"):
        collectives = Mutable(met(facts.device), shard.size) if met else alone(shard.size)
    rank = build_rank(config, facts, shard, collectives, set_up)
    name = "step-invariant" if config.batch_invariant else "step"
    record = Record(name, options(arguments), arguments.out) if leads else None
    bench = Bench(arguments, rank, ceilings, record, start)
    run_parts(bench)
    if record is not None:
        finish(bench, record)
    if isinstance(collectives, Mutable):
        collectives.close()
    return 1 if bench.failures else 0


def options(arguments: argparse.Namespace) -> dict[str, object]:
    return vars(arguments) | {"out": None}


if __name__ == "__main__":
    sys.exit(main())
