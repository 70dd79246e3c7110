"""CudaRoundOps on the CPU, the kernels' own source emulated, against the reference."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels.cuda_round import CudaRoundOps, beyond_kernels
from tests.kernels.round_cases import check_round
from tests.kernels.simt_loader import simt_loader


@pytest.mark.parametrize("seed", range(4))
def test_a_round_equals_the_reference(seed: int) -> None:
    device = torch.device("cpu")
    check_round(CudaRoundOps(device, simt_loader(seed=seed)), seed, device)


def test_what_rounds_do_not_take_is_said_before_anything_is_captured() -> None:
    assert beyond_kernels(vocab=163840, depth=7, page_size=16) is None
    assert "300000 tokens" in str(beyond_kernels(vocab=300_000, depth=7, page_size=16))
    assert "16 tokens ahead" in str(beyond_kernels(vocab=2048, depth=16, page_size=16))
    assert "power of two" in str(beyond_kernels(vocab=2048, depth=7, page_size=24))
