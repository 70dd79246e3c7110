"""The verify pass with its attention kernel against transformers, node by node."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdray.kernels.cuda import CudaOps
from tests.kernels.tree_oracle import KIND, check_every_node
from tests.model.tiny import save_plain

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("resident", [False, True], ids=["host plan", "device plan"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_node_has_the_logits_of_its_path(
    tmp_path: Path, device: torch.device, page_size: int, resident: bool
) -> None:
    folder = save_plain(tmp_path / KIND, KIND)
    check_every_node(folder, CudaOps(device), device, page_size, resident=resident)
