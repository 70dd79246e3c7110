from __future__ import annotations

import pytest
import torch

from kdray.kernels.ops import Ops, load_ops


@pytest.fixture
def ops() -> Ops:
    return load_ops("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
