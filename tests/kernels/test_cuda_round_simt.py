"""CudaRoundOps on the CPU, the kernels' own source emulated, against the reference."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels.cuda_round import CudaRoundOps
from tests.kernels.round_cases import check_round
from tests.kernels.simt_loader import simt_loader


@pytest.mark.parametrize("seed", range(4))
def test_a_round_equals_the_reference(seed: int) -> None:
    device = torch.device("cpu")
    check_round(CudaRoundOps(device, simt_loader(seed=seed)), seed, device)
