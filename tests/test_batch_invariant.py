"""Ops whose bits do not depend on the step, as far as a CPU shows them: their slices, the sums of
ranks in order, and what is refused where they cannot be had. tests/gpu has the rest."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from kdray import demo
from kdray.config import EngineConfig
from kdray.errors import ConfigError, KernelError
from kdray.facts import check_invariant, resolve
from kdray.kernels import reference_gemm
from kdray.kernels.cuda_invariant import workspace_bytes
from kdray.kernels.fixed_rows import FIXED_ROWS, at_fixed_size
from kdray.kernels.invariant_ops import InvariantOps
from kdray.kernels.moe_layout import PackedExperts
from kdray.kernels.ops import load_ops
from kdray.kernels.reference import ReferenceOps
from kdray.model.config import ModelConfig
from kdray.model.target import TargetModel
from kdray.verifier.collectives import TorchCollectives, open_store
from tests.kernels.simt_loader import simt_loader
from tests.test_memory_plan import RTX, kimi

CPU = torch.device("cpu")
WISHED = EngineConfig(batch_invariant=True, dtype="bfloat16")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(scope="module")
def ops() -> InvariantOps:
    return InvariantOps(CPU, simt_loader())


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_products_of_any_number_of_rows(ops: InvariantOps) -> None:
    """Slices of 128, of which the last is short; and a matrix that no kernel takes."""
    for outputs in (64, 20):
        x, weight = drawn(131, 64), drawn(outputs, 64, seed=1).mT / 8
        found = ops.linear(x, weight)
        close(found, reference_gemm.linear(x, weight))
        for own in (slice(0, 1), slice(120, 131), slice(3, 131)):
            assert torch.equal(ops.linear(x[own], weight), found[own])
        added = drawn(131, outputs, seed=2)
        assert torch.equal(ops.linear(x, weight, add=added), found + added)
        both = drawn(2 * outputs, 64, seed=3).mT / 8
        wide = ops.linear(x, weight, dtype=torch.float32)
        logits, gates = ops.linear_and_gated(x, weight, both, dtype=torch.float32)
        assert torch.equal(logits, wide) and torch.equal(gates, ops.gated_linear(x, both))
        close(gates, reference_gemm.gated_linear(x, both))
        few = ops.linear_and_gated(x[:9], weight, both, dtype=torch.float32)
        assert torch.equal(few[0], logits[:9]) and torch.equal(few[1], gates[:9])


def test_a_gate_that_no_kernel_takes_beside_a_product_that_one_does(
    ops: InvariantOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, gate_up = drawn(9, 64), drawn(16, 64, seed=1).mT, drawn(24, 64, seed=2).mT / 8
    by_library, sizes = reference_gemm.gated_linear, []

    def watched(x: Tensor, gate_up: Tensor) -> Tensor:
        sizes.append(len(x))
        return by_library(x, gate_up)

    monkeypatch.setattr(reference_gemm, "gated_linear", watched)
    logits, gates = ops.linear_and_gated(x, weight, gate_up)
    assert sizes == [FIXED_ROWS]
    assert torch.equal(logits, ops.linear(x, weight))
    close(gates, by_library(x, gate_up))


def test_products_a_head_of_any_number_of_rows(ops: InvariantOps) -> None:
    for outputs in (32, 12):
        x, weight = drawn(130, 2, 64), drawn(2, outputs, 64, seed=1).mT / 8
        found = ops.per_head(x, weight)
        close(found, ReferenceOps(CPU).per_head(x, weight))
        wide = torch.full((130, 2, outputs + 16), torch.nan, dtype=torch.bfloat16)
        ops.per_head(x, weight, wide[..., :outputs])
        assert torch.equal(wide[..., :outputs], found) and wide[..., outputs:].isnan().all()
        assert torch.equal(ops.per_head(x[127:129], weight), found[127:129])


def test_experts_that_no_kernel_takes_are_refused(ops: InvariantOps) -> None:
    experts = PackedExperts.empty(4, 32, 32, CPU)
    x, expert = torch.zeros(2, 32), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(KernelError, match="leave batch_invariant out"):
        ops.moe_w4a16(x, expert, expert.float(), experts, x)


def test_a_fixed_size() -> None:
    sizes: list[int] = []

    def run(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return 2 * rows

    for count in (1, FIXED_ROWS - 1, FIXED_ROWS):
        rows = torch.arange(3 * count).view(count, 3)
        assert torch.equal(at_fixed_size(rows, run), 2 * rows)
    assert sizes == [FIXED_ROWS] * 3


def test_experts_in_16_bits_run_at_a_fixed_size() -> None:
    class Invariant(ReferenceOps):
        batch_invariant = True

    folder = demo.target_path()
    plain, fixed = (TargetModel.load(folder, ops=kind(CPU)) for kind in (ReferenceOps, Invariant))
    x = torch.randn(140, plain.config.hidden_size)
    for one, other in zip(plain.layers, fixed.layers, strict=True):
        torch.testing.assert_close(other.mlp.partial(x), one.mlp.partial(x), rtol=1e-4, atol=1e-4)


def test_it_is_for_bfloat16_on_gpus() -> None:
    with pytest.raises(ConfigError, match=r"bfloat16 on cpu .* leave it out"):
        resolve(replace(WISHED, device="cpu"))
    with pytest.raises(ValueError, match="for GPUs"):
        load_ops("cpu", batch_invariant=True)
    model = ModelConfig.from_folder(demo.target_path())
    check_invariant(WISHED, model, "cuda", torch.bfloat16)
    check_invariant(EngineConfig(), model, "cpu", torch.float32)
    with pytest.raises(ConfigError, match="float32 on cuda with KV in float32"):
        check_invariant(WISHED, model, "cuda", torch.float32)
    with pytest.raises(ConfigError, match="KV in fp8"):
        check_invariant(replace(WISHED, kv_dtype="fp8"), model, "cuda", torch.bfloat16)
    with pytest.raises(ConfigError, match="pages of 48"):
        check_invariant(replace(WISHED, page_size=48), model, "cuda", torch.bfloat16)


def test_the_plan_counts_its_workspace_and_its_launches() -> None:
    def items(**wishes: object) -> dict[str, int]:
        return {item.name: item.bytes for item in kimi(8, **wishes).plan(0, RTX).items}

    small: dict[str, object] = {"max_requests": 1, "prefill_chunk": 128}  # one launch does for all
    usual, invariant = (items(batch_invariant=wish, **small) for wish in (False, True))
    assert invariant["workspaces"] - usual["workspaces"] == workspace_bytes(512)
    assert invariant["CUDA graphs"] == usual["CUDA graphs"]
    usual, invariant = (items(batch_invariant=wish, max_requests=128) for wish in (False, True))
    assert invariant["CUDA graphs"] > usual["CUDA graphs"] + (1 << 27)


NUMBERS = 1000


def part_of(rank: int) -> Tensor:
    return (drawn(NUMBERS, seed=rank).float() * 10.0 ** (2 - rank)).bfloat16()


def sum_up(rank: int, port: int, said: SimpleQueue[Any]) -> None:
    collectives = TorchCollectives(
        rank=rank, size=3, host="127.0.0.1", port=port, device=CPU, timeout_s=60
    )
    collectives.prove(in_rank_order=True)
    whole = collectives.all_reduce(part_of(rank))
    some = collectives.all_reduce(part_of(rank)[990:].clone())
    said.put((whole.view(torch.int16).tolist(), some.view(torch.int16).tolist()))
    collectives.close()


def test_sums_in_the_order_of_ranks() -> None:
    """In float32 and rounded once; the same bits on all ranks and beside any other numbers."""
    context = multiprocessing.get_context("spawn")
    store, port = open_store("127.0.0.1", 60)
    said = context.SimpleQueue()
    ranks = [context.Process(target=sum_up, args=(rank, port, said)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    heard = [said.get() for _ in ranks]
    for rank in ranks:
        rank.join(60)
    del store
    total = (part_of(0).float() + part_of(1).float()) + part_of(2).float()
    wanted = total.bfloat16().view(torch.int16).tolist()
    assert heard == [(wanted, wanted[990:])] * 3
    assert wanted != (part_of(0) + part_of(1) + part_of(2)).view(torch.int16).tolist()
