"""all_reduce.cu between two GPUs: every sum of 100,000 launches, in graphs and out, and by NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch

from kdray.kernels.cuda_reduce import OneShotReduce, SharedRegions
from kdray.kernels.graphs import record
from kdray.kernels.loader import KernelLoader
from kdray.model.parallel import Shard
from kdray.verifier.collectives import TorchCollectives
from kdray.verifier.short_sums import CAPACITY_BYTES, SIZES, open_short_sums
from tests.gpu.two_gpus import HOST, WAIT_S, run_both

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

LAUNCHES, A_GRAPH = 100_000, 100
JOB = Path(__file__).resolve().parents[2] / "jobs" / "bench_all_reduce.py"


def be_rank(rank: int, port: int, said: SimpleQueue[tuple[int, int, int]]) -> None:
    device = torch.device("cuda", 0)
    collectives = TorchCollectives(
        rank=rank, size=2, host=HOST, port=port, device=device, timeout_s=WAIT_S
    )

    def gather(handle: torch.Tensor) -> torch.Tensor:
        joined = collectives.all_gather(handle.int().to(device))
        return joined.view(2, -1).to(torch.uint8).cpu()

    regions = SharedRegions(rank, CAPACITY_BYTES, gather)
    reduce = OneShotReduce(KernelLoader(device), regions.addresses, rank, CAPACITY_BYTES)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    counter = torch.zeros((), dtype=torch.int64, device=device)
    place = torch.arange(3 * 7168, device=device)
    x = torch.empty(3 * 7168, dtype=torch.bfloat16, device=device)

    def pattern(of: int) -> torch.Tensor:
        """Small integers, exact in bf16, other ones for every launch and rank."""
        return (place * 7 + counter * 13 + of * 29) % 61

    def run() -> None:
        for _ in range(A_GRAPH):
            counter.add_(1)
            x.copy_(pattern(rank))
            reduce.all_reduce(x)
            wrong.add_((x != (pattern(0) + pattern(1)).to(x.dtype)).sum())

    replay = record(run, torch.cuda.graph_pool_handle())
    for _ in range(LAUNCHES // A_GRAPH):
        replay()
    torch.cuda.synchronize()
    sums = open_short_sums(collectives, Shard(rank, 2), device)
    said.put((rank, int(wrong), sums.limit_bytes if sums is not None else 0))
    regions.close()
    collectives.close()


def test_every_sum_of_very_many_launches_is_right() -> None:
    (_, wrong, limit), (_, other_wrong, other_limit) = sorted(run_both(be_rank))
    assert wrong == other_wrong == 0
    assert limit == other_limit and limit in (0, *SIZES)


def test_both_ways_through_their_benchmark() -> None:
    words = ["--tp", "2", "--rows", "1", "64", "512", "--numbers", "7", "24", "--replays", "5"]
    command = [sys.executable, str(JOB), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    record = json.loads(done.stdout.splitlines()[-1])
    found = {row["params"]["numbers"]: row["metrics"] for row in record["rows"]}
    assert [numbers for numbers, metrics in found.items() if "own_us" in metrics] == [
        24, 7168, 64 * 7168,
    ]  # fmt: skip
    assert all(metrics["nccl_us"] > 0 for metrics in found.values())
    assert record["config"]["start_up_bytes"] in (0, *SIZES)
