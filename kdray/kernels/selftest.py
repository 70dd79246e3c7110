"""Every kernel against its reference on the very card that is to serve, one small case each.

A kernel that was built wrongly for an architecture computes something else and says nothing: public
engines have answered with loops of one token for weeks. The sizes are the model's own, so that what
is compiled and looked at here is what runs afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.ops import Ops
from kdray.kernels.reference import ReferenceOps
from kdray.kernels.reference_round import ReferenceRoundOps
from kdray.kernels.round_ops import RoundOps
from kdray.kernels.selftest_cases import CASES, ROUND_CASES, Case, Codes, Output, Tokens
from kdray.kernels.selftest_inputs import Inputs, Sizes

# Largest difference over the largest value: sums in another order, rounded to bf16 two or three
# times on the way. A kernel that is wrong is off by its whole size.
CLOSE = {torch.bfloat16: 2**-5, torch.float32: 1e-4}
CLOSE_CODES = 2**-3  # from 416 to 448, the largest codes, is 1/14
SCORE_UNITS = 16  # a float32 log-sum-exp may round otherwise: 4e-6 nat in fixed point


def check_kernels(ops: Ops, round_ops: RoundOps | None, sizes: Sizes, device: torch.device) -> None:
    """KernelError names the first kernel that is wrong on this card. Nothing to do on a CPU."""
    if device.type == "cpu":
        return
    compare(ops, ReferenceOps(device), sizes, device)
    if round_ops is not None:
        compare_rounds(round_ops, ReferenceRoundOps(device), sizes, device)
    torch.cuda.empty_cache()  # what it took is for weights and pages


def compare(ops: Ops, reference: Ops, sizes: Sizes, device: torch.device) -> None:
    """Every op of `ops` against the same of `reference`, in turn."""
    inputs = Inputs(sizes, device)
    for name, run in CASES.items():
        _check(name, run, inputs, ops, reference)


def compare_rounds(ops: RoundOps, reference: RoundOps, sizes: Sizes, device: torch.device) -> None:
    """The same for the ops of device rounds."""
    inputs = Inputs(sizes, device)
    for name, run in ROUND_CASES.items():
        _check(name, run, inputs, ops, reference)


def _check(name: str, run: Case, inputs: Inputs, ops: Any, reference: Any) -> None:
    try:
        found = [_on_host(value) for value in run(ops, inputs)]  # waits, so that a fault shows here
    except Exception as error:
        raise KernelError(f"kernel {name} fails on {_card(inputs.device)}: {error}") from error
    for i, (value, wanted) in enumerate(zip(found, run(reference, inputs), strict=True)):
        if (why := _difference(value, _on_host(wanted))) is not None:
            raise KernelError(
                f"kernel {name} is wrong on {_card(inputs.device)}: output {i} {why}; nothing may "
                "be served with it: try another driver or CUDA version, and report this line"
            )


def _difference(found: Output, wanted: Output) -> str | None:
    """What is amiss, or None."""
    if isinstance(found, Codes) and isinstance(wanted, Codes):
        return _distance(found.value, wanted.value, CLOSE_CODES)
    if isinstance(found, Tokens) and isinstance(wanted, Tokens):
        off = (found.score.long() - wanted.score.long()).abs().max().item()
        return None if off <= SCORE_UNITS else f"is off by {off} units of 2^-22 nat"
    assert isinstance(found, Tensor) and isinstance(wanted, Tensor)
    return _distance(found, wanted, CLOSE.get(wanted.dtype, 0.0))


def _distance(found: Tensor, wanted: Tensor, allowed: float) -> str | None:
    """allowed: of the largest number; integers are to be equal."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"is {list(found.shape)} {found.dtype}, not {list(wanted.shape)} {wanted.dtype}"
    if not wanted.is_floating_point():
        differing = int((found != wanted).sum())
        return f"differs in {differing} of {wanted.numel()} integers" if differing else None
    if not found.isfinite().all():
        return "holds numbers that are not finite"
    off = (found.double() - wanted.double()).abs().max().item()
    share = off / max(wanted.double().abs().max().item(), 1e-30)
    return None if share <= allowed else f"is off by {share:.2g} of its size ({allowed:.2g} is due)"


def _on_host(value: Output) -> Output:
    return value.cpu() if isinstance(value, Tensor) else type(value)(value[0].cpu())


def _card(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
