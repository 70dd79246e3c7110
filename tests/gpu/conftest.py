"""Tests that need a CUDA device; all bear the marker `gpu`. With one none is skipped but those
between two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kdray.kernels.loader import KernelLoader


@pytest.fixture(scope="session")
def device() -> torch.device:
    assert torch.cuda.is_available(), "no CUDA device: run with -m 'not gpu', or on a GPU host"
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def loader(device: torch.device) -> KernelLoader:
    return KernelLoader(device)


@pytest.fixture(autouse=True)
def finished() -> Iterator[None]:
    """A fault of a launch shows in the test that launched it."""
    torch.manual_seed(0)
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
