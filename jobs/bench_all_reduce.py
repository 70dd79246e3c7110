#!/usr/bin/env python3
"""Microseconds of summing rows over the GPUs of one host: kdray's one-shot kernel beside NCCL.

    python jobs/bench_all_reduce.py --tp 2 --out benchmarks/results
    python jobs/bench_all_reduce.py --tp 2 --device cpu --rows 1 8

A process a GPU. Messages are rows of bf16 as a layer of Kimi K2.6 sums them twice, and a few short
ones of other lengths; they stay in L2, as what a layer has just written does.

own_us, nccl_us            a sum, of --calls behind one another in a CUDA graph
own_gbps, nccl_gbps        the message's bytes over that time (nccl-tests call it algbw)
front_us                   a small kernel that writes the message, in such a graph
own_pair_us, nccl_pair_us  that kernel and a sum behind it, as in a step
own_norm_us, nccl_norm_us  those two and the residual add and norm behind them, up to 80 rows
fused_us                   the same, sum and norm in one launch
nccl_same_bits             1 where all ranks got the same bits of NCCL; of the kernel they must

start_up says which of the two an engine takes for such a message on this host, by what it measures
when it starts, up to 1 MB; start_up_norm_rows up to how many rows it takes sum and norm at once.
The kernel is timed up to --own-bytes. A sum that a graph leaves is compared with one in float64
first, and the bits of one launch with those of two. Graphs are replayed without a pause, so that a
replay finds the ranks together from the one before; a sample is a replay on the rank that took
longest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from normed_sums import Sum, check_bits, normed_sums
from record import Record
from step_ranks import join, ranks_beside
from step_time import replayed, spans_ms
from torch import Tensor

from kdray.arguments import HelpFormatter
from kdray.errors import KdrayError, LinkError
from kdray.kernels.cuda_reduce import MAX_RANKS, OneShotReduce, SharedRegions
from kdray.kernels.loader import KernelLoader
from kdray.kernels.ops import Ops, load_ops
from kdray.model.parallel import Collectives, Shard
from kdray.verifier.links import check_links
from kdray.verifier.short_sums import open_regions, open_short_sums

ROWS = [1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 128, 512, 2048]
HIDDEN = 7168
NUMBERS = [7, 8, 24, 1000, 7176]  # 7 are no whole vectors of 16 bytes: NCCL's alone
BF16 = torch.bfloat16
ROUNDING = torch.finfo(BF16).eps / 2  # of a number to bf16, at most
FLOAT_ROUNDING = torch.finfo(torch.float32).eps
OWN = "own"
NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class Message:
    """[rows, width] of bf16."""

    rows: int
    width: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.width * BF16.itemsize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """This rank and its ways to sum.

    ops         for what follows a sum
    own         None where the GPUs cannot read one another's memory
    limit       bytes up to which an engine would take it here
    norm_rows   rows up to which it would take the norm in the same launch
    regions     what it sums in
    """

    shard: Shard
    device: torch.device
    nccl: Collectives
    ops: Ops
    own: OneShotReduce | None = None
    limit: int = 0
    norm_rows: int = 0
    regions: tuple[SharedRegions, ...] = ()

    def sums(self, x: Tensor) -> dict[str, Sum]:
        """The ways that take such a message."""
        ways: dict[str, Sum] = {NCCL: self.nccl.all_reduce}
        if self.own is not None and self.own.takes(x):
            ways[OWN] = self.own.all_reduce
        return ways


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table, in Record's terms."""

    params: dict[str, str | int | float]
    samples: dict[str, list[float]]
    extra: dict[str, float | None]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        with ranks_beside(arguments.tp, be_rank, arguments) as port:
            be_rank(0, port, arguments)
    except KdrayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    gpus = torch.cuda.device_count()
    add("--tp", type=int, default=max(2, gpus), help="ranks, a GPU each: 2 to 8")
    add("--rows", type=int, nargs="*", default=ROWS, help="of --hidden numbers, a message each")
    add("--hidden", type=int, default=HIDDEN)
    add("--numbers", type=int, nargs="*", default=NUMBERS, help="of messages of other lengths")
    add("--own-bytes", type=int, default=4 << 20, help="the kernel's longest message")
    add("--calls", type=int, default=40, help="sums in a graph")
    add("--replays", type=int, default=30, help="of a graph, a sample each")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: gloo, to try the job")
    add("--out", type=Path, default=None, help="folder of the results file")
    arguments = parser.parse_args(argv)
    if not 2 <= arguments.tp <= MAX_RANKS:
        parser.error(f"--tp must be 2 to {MAX_RANKS}")
    if min(arguments.calls, arguments.replays, *arguments.rows, *arguments.numbers) < 1:
        parser.error("rows, numbers, calls and replays are 1 or more")
    if arguments.device == "cuda" and gpus < arguments.tp:
        parser.error(f"--tp {arguments.tp} takes as many GPUs, and torch sees {gpus} here")
    return arguments


def messages_of(arguments: argparse.Namespace) -> list[Message]:
    """The short ones first."""
    odd = [Message(1, numbers) for numbers in arguments.numbers]
    return odd + [Message(rows, arguments.hidden) for rows in arguments.rows]


def be_rank(rank: int, port: int, arguments: argparse.Namespace) -> None:
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", 0)  # step_ranks.py shows ranks beside their own alone
        torch.cuda.set_device(device)
    shard = Shard(rank, arguments.tp)
    nccl = join(rank, shard.size, port, device)
    check_links(nccl, shard, device)
    ranks = ways_of(shard, device, nccl, arguments.own_bytes)
    record = None
    if rank == 0:
        found = {"start_up_bytes": ranks.limit, "start_up_norm_rows": ranks.norm_rows}
        config = vars(arguments) | {"out": None} | found
        record = Record("all-reduce", config, arguments.out)
    for message in messages_of(arguments):
        row = bench(ranks, message, arguments.calls, arguments.replays)
        if record is not None:
            record.add(row.params, row.samples, row.extra)
    if record is not None:
        record.finish()
    for regions in ranks.regions:
        regions.close()
    nccl.close()


def ways_of(shard: Shard, device: torch.device, nccl: Collectives, own_bytes: int) -> Ranks:
    """What an engine's start-up measures, and the kernel with more room than an engine gives it."""
    found = partial(Ranks, shard=shard, device=device, nccl=nccl, ops=load_ops(device))
    if device.type == "cpu":
        return found()
    short = open_short_sums(nccl, shard, device)
    regions = open_regions(nccl, shard, device, own_bytes)
    if regions is None:
        return found()
    own = OneShotReduce(KernelLoader(device), regions.addresses, shard.rank, own_bytes)
    if short is None:
        return found(own=own, regions=(regions,))
    return found(
        own=own,
        regions=(regions, short.regions),
        limit=short.limit_bytes,
        norm_rows=short.norm_rows,
    )


def bench(ranks: Ranks, message: Message, calls: int, replays: int) -> Row:
    """One message, summed by every way that takes it; all ranks together."""
    source = part_of(ranks.shard.rank, message, ranks.device)
    x = torch.empty_like(source)
    sums = ranks.sums(x)
    normed = normed_sums(sums, ranks.own, x, ranks.ops)

    def front() -> Tensor:
        return torch.neg(source, out=x)

    def pair(way: Sum) -> None:
        way(front())

    runs: dict[str, Callable[[], object]] = {"front": front}
    for name, way in sums.items():
        runs |= {f"{name}_pair": partial(pair, way), name: partial(way, x)}
    runs |= {name: partial(pair, way) for name, way in normed.items()}
    check_bits(normed, OWN, front)
    samples, same = {}, {}
    for name, run in runs.items():
        graph = replayed(partial(repeat, run, calls), ranks.device)
        way_name = name.removesuffix("_pair")
        if way_name != name:
            graph()
            same[way_name] = checked(ranks, way_name, message, -x)
        times = [1e3 * ms / calls for ms in spans_ms(graph, ranks.device, replays)]
        samples[f"{name}_us"] = slowest(ranks, times)
    params: dict[str, str | int | float] = {
        "rows": message.rows, "numbers": message.rows * message.width,
        "bytes": message.num_bytes, "tp": ranks.shard.size,
        "start_up": OWN if OWN in sums and message.num_bytes <= ranks.limit else NCCL,
    }  # fmt: skip
    return Row(params, samples, figures(message, samples) | {"nccl_same_bits": float(same[NCCL])})


def repeat(run: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        run()


def figures(message: Message, samples: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    return {
        f"{name}_gbps": message.num_bytes / statistics.median(samples[f"{name}_us"]) / 1e3
        for name in (OWN, NCCL)
        if f"{name}_us" in samples
    }


def slowest(ranks: Ranks, samples: Sequence[float]) -> list[float]:
    """Of every replay the time on the rank that took longest."""
    own = torch.tensor([samples], device=ranks.device)
    times: list[float] = ranks.nccl.all_gather(own).view(ranks.shard.size, -1).amax(0).tolist()
    return times


def part_of(rank: int, message: Message, device: torch.device) -> Tensor:
    """What a rank brings: numbers of all signs and mantissas within +-4, the same everywhere."""
    place = torch.arange(message.rows * message.width, device=device)
    numbers = (place * 31 + rank * 977 + 1) % 8191 - 4095
    return (numbers.float() / 1024).to(BF16).view(message.rows, message.width)


def checked(ranks: Ranks, name: str, message: Message, got: Tensor) -> bool:
    """Whether all ranks got the same bits. Raises LinkError where a sum is wrong, or where the
    kernel's differs between ranks."""
    size = ranks.shard.size
    if not is_sum(got, message, size, rounded_each_time=name == NCCL):
        raise LinkError(f"rank {ranks.shard.rank} got a wrong sum of {message} by {name}")
    bits = ranks.nccl.all_gather(got.view(torch.uint8).reshape(1, -1)).view(size, -1)
    same = bool((bits == bits[0]).all())
    if name == OWN and not same:
        raise LinkError(f"the ranks got different bits of {message} by the kernel")
    return same


def is_sum(got: Tensor, message: Message, size: int, *, rounded_each_time: bool) -> bool:
    """Whether it is the ranks' sum, but for its roundings to bf16: one at the end, or one of every
    partial sum."""
    wanted = torch.zeros(got.shape, dtype=torch.float64, device=got.device)
    magnitude = torch.zeros_like(wanted)
    for rank in range(size):
        part = part_of(rank, message, got.device).double()
        wanted += part
        magnitude += part.abs()
    allowed = ROUNDING * wanted.abs() + size * FLOAT_ROUNDING * magnitude
    if rounded_each_time:
        allowed += size * ROUNDING * magnitude
    return bool(((got.double() - wanted).abs() <= allowed).all())


if __name__ == "__main__":
    sys.exit(main())
