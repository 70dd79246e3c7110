"""The self-test passes sound kernels and stops at a wrong one, with its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels import selftest
from kdray.kernels.cuda import CudaOps
from kdray.kernels.latent_rows import FP8, RowFormat
from kdray.kernels.ops import RoutingRule
from kdray.kernels.reference import ReferenceOps
from kdray.kernels.reference_round import ReferenceRoundOps
from kdray.kernels.selftest import check_kernels, compare, compare_rounds
from kdray.kernels.selftest_cases import CASES, ROUND_CASES
from kdray.kernels.selftest_inputs import DraftSizes, Sizes
from tests.kernels.simt_loader import simt_loader

CPU = torch.device("cpu")
SIZES = Sizes(
    width=64,
    heads=2,
    nope=16,
    value=16,
    latent=64,
    query_latent=96,
    rope=16,
    vocab=300,
    experts=8,
    inner=32,
    rule=RoutingRule(top_k=2, num_groups=1, top_groups=1, normalize=True, scale=2.5),
    packed=True,
    dtype=torch.bfloat16,
    kv_row=RowFormat.of(64, 16, torch.bfloat16),
    page_size=4,
    draft=DraftSizes(heads=4, groups=2, dim=64, slots=5),
)
FP32 = replace(SIZES, dtype=torch.float32, kv_row=RowFormat.of(64, 16, torch.float32))
IN_FP8 = replace(SIZES, kv_row=RowFormat.of(64, 16, FP8))
DENSE = replace(SIZES, experts=0, rule=None, packed=False, draft=None, query_latent=0)
ALL = {
    "bf16": SIZES,
    "fp32": FP32,
    "fp8 cache": IN_FP8,
    "dense, no drafter, no latent queries": DENSE,
}
METHOD = {  # of the case, where it is not the case's name
    "verify_attention of prompts": "verify_attention",
    "moe_w4a16_few": "moe_w4a16",
    "moe_w4a16_many": "moe_w4a16",
    "build_trees of rounds": "build_trees",
    "accept_paths of rounds": "accept_paths",
}


class Spoilt:
    """Sound ops but for one, whose results, or what it was to write, are a little off."""

    def __init__(self, inner: Any, name: str, spoil: Callable[[Tensor], None]) -> None:
        self._inner, self._name, self._spoil = inner, name, spoil

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name != self._name:
            return method

        def wrong(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            for tensor in self._written(args, result):
                self._spoil(tensor)
            return result

        return wrong

    def _written(self, args: tuple[Any, ...], result: Any) -> list[Tensor]:
        if self._name == "rope_cache":
            return [args[2]]
        if self._name in ("commit_kv", "commit_paths"):
            return [args[0][0]]
        if self._name == "advance_requests":
            return [args[0].root_position]
        if isinstance(result, Tensor):
            return [result]
        if isinstance(result, tuple):
            return list(result)
        values = [getattr(result, name) for name in result.__dataclass_fields__]
        return [value for value in values if isinstance(value, Tensor)] or [result.trees.token]


def off(tensor: Tensor) -> None:
    """The second row by a tenth of the largest number; integers by many."""
    place = tensor if tensor.dim() == 1 else tensor[min(1, len(tensor) - 1)]
    if tensor.is_floating_point():
        place += 0.1 * tensor.float().abs().max().to(tensor.dtype)
    elif tensor.dtype == torch.uint8:
        place ^= 0x40
    else:
        place += 100


@pytest.mark.parametrize("name", ALL)
def test_the_reference_equals_itself(name: str) -> None:
    compare(ReferenceOps(CPU), ReferenceOps(CPU), ALL[name], CPU)
    compare_rounds(ReferenceRoundOps(CPU), ReferenceRoundOps(CPU), ALL[name], CPU)


@pytest.mark.parametrize("sizes", [SIZES, FP32, IN_FP8], ids=["bf16", "fp32", "fp8 cache"])
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_kernel_is_named(case: str, sizes: Sizes) -> None:
    method = METHOD.get(case, case)
    wrong = Spoilt(ReferenceOps(CPU), method, off)
    first = next(name for name in CASES if METHOD.get(name, name) == method)
    with pytest.raises(KernelError, match=rf"kernel {first} is wrong on cpu: output \d"):
        compare(wrong, ReferenceOps(CPU), sizes, CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ROUND_CASES)
def test_a_wrong_kernel_of_rounds_is_named(case: str) -> None:
    wrong = Spoilt(ReferenceRoundOps(CPU), METHOD.get(case, case), off)
    with pytest.raises(KernelError, match=rf"kernel {case} is wrong on cpu: output \d"):
        compare_rounds(wrong, ReferenceRoundOps(CPU), SIZES, CPU)  # type: ignore[arg-type]


def test_numbers_that_are_none_are_found() -> None:
    wrong = Spoilt(ReferenceOps(CPU), "swiglu", lambda t: t.fill_(torch.nan))  # type: ignore[arg-type,return-value]
    with pytest.raises(KernelError, match=r"kernel swiglu is wrong .* numbers that are not finite"):
        compare(wrong, ReferenceOps(CPU), SIZES, CPU)  # type: ignore[arg-type]


def test_a_kernel_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(ReferenceOps):
        def verify_attention(self, *_: Any) -> Tensor:
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(KernelError, match="kernel verify_attention fails on cpu: an illegal mem"):
        compare(Failing(CPU), ReferenceOps(CPU), SIZES, CPU)


def test_every_op_has_a_case() -> None:
    ops = {name for name, op in vars(selftest.Ops).items() if callable(op) and name[0] != "_"}
    assert ops == {METHOD.get(name, name) for name in CASES}
    rounds = {name for name in vars(selftest.RoundOps) if not name.startswith("_")}
    assert rounds == {METHOD.get(name, name) for name in ROUND_CASES}


def test_on_a_cpu_there_is_nothing_to_do() -> None:
    check_kernels(None, None, SIZES, CPU)  # type: ignore[arg-type]


def test_the_kernels_own_source_passes() -> None:
    compare(CudaOps(CPU, simt_loader(seed=1)), ReferenceOps(CPU), SIZES, CPU)
