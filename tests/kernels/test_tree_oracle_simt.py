"""The same on the CPU, by the kernels' own source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdray.kernels.cuda import CudaOps
from tests.kernels.simt_loader import simt_loader
from tests.kernels.tree_oracle import KIND, check_every_node
from tests.model.tiny import save_plain


@pytest.mark.parametrize("resident", [False, True], ids=["host plan", "device plan"])
def test_every_node_has_the_logits_of_its_path(tmp_path: Path, resident: bool) -> None:
    device = torch.device("cpu")
    folder = save_plain(tmp_path / KIND, KIND)
    ops = CudaOps(device, simt_loader(seed=5))
    check_every_node(folder, ops, device, page_size=16, resident=resident)
