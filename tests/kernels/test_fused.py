"""The fused ops' choices: what goes to a kernel, in which shape, and what to the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdray.kernels import cuda_fused, reference_fused
from kdray.kernels.cuda_fused import CudaFused
from kdray.kernels.ops import RoutingRule
from tests.kernels import fused_cases as cases
from tests.kernels.test_cuda_launches import RecordingLoader

CPU = torch.device("cpu")


class Recorder(RecordingLoader):
    device = CPU


@pytest.fixture
def loader() -> RecordingLoader:
    return Recorder()


@pytest.fixture
def fused(loader: RecordingLoader) -> CudaFused:
    return CudaFused(loader)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 128, 512, 576, 2048, 2056, 7168, 16384])
def test_a_block_of_rms_norm_holds_a_row(width: int, dtype: torch.dtype) -> None:
    defines = cuda_fused.norm_defines(width, dtype)
    vectors, threads = width * dtype.itemsize // 16, int(defines["THREADS"])
    assert threads % 32 == 0 and threads <= cuda_fused.MOST_NORM_THREADS
    assert vectors <= threads * cuda_fused.MAX_ITEMS
    assert vectors > threads - 32, "a warp without work"


def test_launches_cover_their_rows(loader: RecordingLoader, fused: CudaFused) -> None:
    norm = cases.some_norm(7168, torch.bfloat16, CPU)
    x = torch.zeros(5, 7168, dtype=torch.bfloat16)
    fused.add_rms_norm(x, x, norm)
    fused.swiglu(torch.zeros(3, 2, 2 * 4096))
    fused.route_experts(torch.zeros(7, 64), torch.zeros(64), cases.RULES["bench"][1])
    rope(fused, heads=64)
    assert [(launch.entry, launch.grid, launch.block) for launch in loader.launches] == [
        ("rms_norm", (5, 1, 1), (448, 1, 1)),
        ("swiglu", (6, 4, 1), (256, 1, 1)),
        ("route_experts", (7, 1, 1), (64, 1, 1)),
        ("rope_cache", (4, 3, 1), (32, 8, 1)),  # 64 * 8 vectors of queries, and the cache's warp
    ]


def rope(fused: CudaFused, heads: int, rows: int = 4, dtype: torch.dtype = torch.bfloat16) -> None:
    placed = cases.SomeRows(
        torch.zeros(rows, 32, dtype=torch.complex64), torch.zeros(rows, dtype=torch.int64)
    )
    query, kv = torch.zeros(rows, heads, 192, dtype=dtype), torch.zeros(rows, 576, dtype=dtype)
    norm = cases.some_norm(512, dtype, CPU)
    fused.rope_cache(query, kv, torch.zeros(9, 576, dtype=dtype), placed, norm)


def test_without_rows_nothing_is_launched(loader: RecordingLoader, fused: CudaFused) -> None:
    x, norm = torch.zeros(0, 64), cases.some_norm(64, torch.float32, CPU)
    assert fused.rms_norm(x, norm).shape == (0, 64)
    total, normed = fused.add_rms_norm(x, x, norm)
    assert total.shape == normed.shape == (0, 64)
    assert fused.swiglu(x).shape == (0, 32)
    expert, weight = fused.route_experts(x, torch.zeros(64), cases.RULES["bench"][1])
    assert expert.shape == weight.shape == (0, 8)
    rope(fused, heads=2, rows=0)
    assert loader.launches == []


def test_what_no_kernel_takes_runs_by_the_reference(
    loader: RecordingLoader, fused: CudaFused
) -> None:
    """Odd widths, float16, transposes, other dtypes side by side, rows off by 4 bytes."""
    odd = cases.drawn(1, 3, 18)
    shifted = cases.drawn(1, 3 * 16 + 1)[1:].view(3, 16)
    for x in (odd, odd.half(), cases.drawn(2, 16, 3).T, shifted):
        norm = cases.some_norm(x.shape[-1], x.dtype, CPU)
        assert torch.equal(fused.rms_norm(x, norm), reference_fused.rms_norm(x, norm))
        total, normed = fused.add_rms_norm(x, x, norm)
        assert torch.equal(total, x + x)
        assert torch.equal(normed, reference_fused.rms_norm(total, norm))
        assert torch.equal(fused.swiglu(x), reference_fused.swiglu(x))
    x, mixed = cases.drawn(1, 3, 16), cases.some_norm(16, torch.float64, CPU)
    assert torch.equal(fused.rms_norm(x, mixed), reference_fused.rms_norm(x, mixed))
    rule = replace(cases.RULES["bench"][1], top_k=33)
    logits, bias = cases.routing_inputs(3, 2000, "normal")
    for given in (logits, logits[:, :64], logits[:, :64].contiguous().double()):
        found = fused.route_experts(given, bias[: given.shape[1]], rule)
        wanted = reference_fused.route_experts(given, bias[: given.shape[1]], rule)
        assert all(map(torch.equal, found, wanted))
    rope(fused, heads=2, dtype=torch.float16)
    assert loader.launches == []


@pytest.mark.parametrize("name", cases.RULES)
def test_a_choice_is_what_sorting_in_float64_says(name: str) -> None:
    """The reference against its definition, expert by expert."""
    experts, rule = cases.RULES[name]
    logits, bias = cases.routing_inputs(20, experts, "normal")
    expert, weight = reference_fused.route_experts(logits, bias, rule)
    score = torch.sigmoid(logits.double())
    for t in range(20):
        chosen = plain_choice((score[t] + bias.double()).tolist(), rule)
        assert expert[t].tolist() == chosen
        share = score[t, chosen]
        if rule.normalize:
            share = share / share.sum()
        torch.testing.assert_close(weight[t].double(), share * rule.scale, rtol=1e-5, atol=1e-7)


def plain_choice(choice: list[float], rule: RoutingRule) -> list[int]:
    size = len(choice) // rule.num_groups
    groups = [choice[g * size : (g + 1) * size] for g in range(rule.num_groups)]
    best = sorted(range(rule.num_groups), key=lambda g: (-sum(sorted(groups[g])[-2:]), g))
    kept = set(best[: rule.top_groups]) if rule.num_groups > 1 else {0}
    order = sorted(range(len(choice)), key=lambda e: (e // size not in kept, -choice[e], e))
    return order[: rule.top_k]
