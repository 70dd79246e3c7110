"""all_reduce_norm.cu between two GPUs: the bits of two launches, in 100,000 launches of graphs too,
among plain sums in the same regions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from multiprocessing.queues import SimpleQueue

import pytest
import torch
from torch import Tensor

from kdray.kernels.cuda_fused import CudaFused
from kdray.kernels.cuda_reduce import DTYPES, MAX_NORM_ROWS, OneShotReduce
from kdray.kernels.graphs import record
from kdray.kernels.loader import KernelLoader
from kdray.kernels.ops import load_ops
from kdray.model.layers import RmsNorm
from kdray.model.parallel import Shard
from kdray.verifier.collectives import TorchCollectives
from kdray.verifier.short_sums import CAPACITY_BYTES, NORM_ROWS, open_regions, open_short_sums
from tests.gpu.two_gpus import HOST, WAIT_S, run_both

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

LAUNCHES, A_GRAPH, CHAIN = 100_000, 100, 60
WIDTHS = (8, 264, 2056, 7168, 16384)
# (rows, width) of the launches of a graph, in turns; of width 0 a plain sum of so many rows
TURNS = (
    (1, 7168), (8, 7168), (3, 0), (2, 24), (5, 7168), (64, 7168), (1, 7168), (MAX_NORM_ROWS, 264),
    (40, 0), (17, 7168), (4, 7168),
)  # fmt: skip


def norm_of(width: int, dtype: torch.dtype, device: torch.device) -> RmsNorm:
    weight = torch.linspace(0.5, 1.5, width, device=device).to(dtype)
    return RmsNorm.of(weight, 1e-6)


def differing(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> Tensor:
    """How many numbers have other bits, [] int64."""
    integers = {2: torch.int16, 4: torch.int32}
    pairs = [
        [t.view(integers[t.itemsize]) for t in both] for both in zip(found, wanted, strict=True)
    ]
    return torch.stack([(a != b).sum() for a, b in pairs]).sum()


def in_one_and_in_two(reduce: OneShotReduce, fused: CudaFused, rank: int) -> int:
    """Numbers in which random rows differ, over all shapes."""
    device, wrong = fused.device, 0
    shapes = product(DTYPES, WIDTHS, [*range(1, 10), 16, 33, 64, MAX_NORM_ROWS])
    for case, (dtype, width, rows) in enumerate(shapes):
        wide = width * dtype.itemsize
        if wide > 1 << 15 or rows * wide > CAPACITY_BYTES:
            continue
        norm = norm_of(width, dtype, device)
        torch.manual_seed(case)
        x = 3 * torch.randn(rows, width, device=device)
        torch.manual_seed(1000 + 2 * case + rank)
        part, x = torch.randn(rows, width, device=device).to(dtype), x.to(dtype)
        found = reduce.all_reduce_norm(part, x, norm)
        wanted = fused.add_rms_norm(x, reduce.all_reduce(part.clone()), norm)
        wrong += int(differing(found, wanted))
    return wrong


def launches(
    reduce: OneShotReduce, fused: CudaFused, rank: int, wrong: Tensor
) -> Callable[[], None]:
    """A graph's worth of them, each of other numbers than the one before; the ranks stand still in
    turns, for longer than a launch takes."""
    device = fused.device
    counter = torch.zeros((), dtype=torch.int64, device=device)
    norms = {width: norm_of(width, torch.bfloat16, device) for _, width in TURNS if width}

    def pattern(shape: tuple[int, int], of: int) -> Tensor:
        """Small integers, exact in bf16 as are the sums of three."""
        place = torch.arange(shape[0] * shape[1], device=device).view(shape)
        return ((place * 7 + counter * 13 + of * 29) % 61).to(torch.bfloat16)

    def run() -> None:
        for launch in range(A_GRAPH):
            rows, width = TURNS[launch % len(TURNS)]
            counter.add_(1)
            shape = (rows, width or 7168)
            part, both = pattern(shape, rank), pattern(shape, 0) + pattern(shape, 1)
            if launch % 7 == 3 * rank:
                torch.cuda._sleep(20_000)
            if width:
                x = pattern(shape, 5)
                found = reduce.all_reduce_norm(part, x, norms[width])
                wrong.add_(differing(found, fused.add_rms_norm(x, both, norms[width])))
            else:
                wrong.add_((reduce.all_reduce(part) != both).sum())

    return run


def without_a_pause(reduce: OneShotReduce, fused: CudaFused, rank: int) -> int:
    """Numbers that differ at the end of chains in which a launch sums what the one before left,
    with nothing between them: each may start while the one in front still runs."""
    norm, wrong = norm_of(7168, torch.bfloat16, fused.device), 0
    for rows in (1, 8, 33, 64):
        torch.manual_seed(rows)
        x = torch.randn(rows, 7168, device=fused.device).bfloat16()
        part = x * (rank + 1)
        found = torch.empty_like(x), torch.empty_like(x)

        def run(x: Tensor = x, part: Tensor = part, kept: tuple[Tensor, Tensor] = found) -> None:
            for _ in range(CHAIN):
                x, part = reduce.all_reduce_norm(part, x, norm)
            kept[0].copy_(x)
            kept[1].copy_(part)

        record(run, torch.cuda.graph_pool_handle())()
        for _ in range(CHAIN):
            x, part = fused.add_rms_norm(x, reduce.all_reduce(part.clone()), norm)
        wrong += int(differing(found, (x, part)))
    return wrong


def be_rank(rank: int, port: int, said: SimpleQueue[tuple[int, dict[str, int]]]) -> None:
    device = torch.device("cuda", 0)
    shard = Shard(rank, 2)
    collectives = TorchCollectives(
        rank=rank, size=2, host=HOST, port=port, device=device, timeout_s=WAIT_S
    )
    regions = open_regions(collectives, shard, device, CAPACITY_BYTES)
    assert regions is not None
    loader = KernelLoader(device)
    reduce = OneShotReduce(loader, regions.addresses, rank, CAPACITY_BYTES)
    fused = CudaFused(loader)
    found = {"shapes": in_one_and_in_two(reduce, fused, rank)}
    found["chain"] = without_a_pause(reduce, fused, rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    replay = record(launches(reduce, fused, rank, wrong), torch.cuda.graph_pool_handle())
    for _ in range(LAUNCHES // A_GRAPH):
        replay()
    torch.cuda.synchronize()
    found["graphs"] = int(wrong)
    del replay
    found |= start_up(collectives, shard, device)
    said.put((rank, found))
    regions.close()
    collectives.close()


def start_up(collectives: TorchCollectives, shard: Shard, device: torch.device) -> dict[str, int]:
    """What an engine's measurement decides, and whether the collectives' own answer is ops' answer
    behind it."""
    sums = open_short_sums(collectives, shard, device)
    norm, ops = norm_of(7168, torch.bfloat16, device), load_ops(device)
    collectives._short = sums
    wrong = 0
    for rows in (1, 8, 9, 33, 64, 65):
        torch.manual_seed(rows)
        x = torch.randn(rows, 7168, device=device).bfloat16()
        part = x.roll(shard.rank, 0) * (shard.rank + 1)
        both = (x.float() + x.roll(1, 0).float() * 2).bfloat16()
        found = collectives.all_reduce_norm(part, x, norm, ops)
        wrong += int(differing(found, ops.add_rms_norm(x, both, norm)))
    return {"engine": wrong, "norm_rows": sums.norm_rows if sums is not None else 0}


def test_one_launch_has_the_bits_of_two() -> None:
    (_, found), (_, others) = sorted(run_both(be_rank))
    assert found == others
    assert found.pop("norm_rows") in (0, *NORM_ROWS)
    assert found == {"shapes": 0, "chain": 0, "graphs": 0, "engine": 0}
