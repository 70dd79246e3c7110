"""The self-test of this card, in the sizes of Kimi K2.6 on eight ranks and of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kdray.config import EngineConfig
from kdray.errors import KernelError
from kdray.facts import resolve
from kdray.kernel_sizes import kernel_sizes
from kdray.kernels.cuda import CudaOps
from kdray.kernels.cuda_round import CudaRoundOps
from kdray.kernels.selftest import check_kernels
from kdray.model.parallel import Shard

pytestmark = pytest.mark.gpu
KIMI = Path(__file__).resolve().parents[2] / "jobs" / "kimi_k26"
CONFIGS = {
    "kimi": EngineConfig(model=str(KIMI), drafter=str(KIMI / "drafter"), tp=8),
    "kimi, fp8 cache": EngineConfig(model=str(KIMI), tp=8, kv_dtype="fp8"),
    "demo": EngineConfig(),
    "demo, fp32": EngineConfig(dtype="float32"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kernel_is_right(device: torch.device, name: str) -> None:
    config = CONFIGS[name]
    sizes = kernel_sizes(config, resolve(config), Shard(0, config.tp))
    check_kernels(CudaOps(device), CudaRoundOps(device), sizes, device)


def test_a_wrong_one_is_named(device: torch.device) -> None:
    class Wrong(CudaOps):
        def verify_attention(self, *args: Any) -> Tensor:
            return super().verify_attention(*args) * 1.1

    sizes = kernel_sizes(CONFIGS["demo"], resolve(CONFIGS["demo"]), Shard())
    with pytest.raises(KernelError, match=r"kernel verify_attention is wrong on .*sm_\d+"):
        check_kernels(Wrong(device), None, sizes, device)
