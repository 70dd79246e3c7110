"""Launches moe_w4a16_few.cu: a layer's routed experts for one row or two, in one launch.

Nothing waits for the device; all may be captured in a graph. Bits are those of moe_w4a16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kdray.kernels.loader import KernelLoader
from kdray.kernels.moe_layout import TILE, PackedExperts

# As in the .cu file.
STAGE = 512  # numbers of `inner` that a warp has room for
SORTED_BYTES = 1040  # of a block's list
MAX_GROUPS = 32  # of 32 columns, a block


class CudaMoeFew:
    """The op on one device. Its workspace serves one launch at a time: use it on one stream."""

    def __init__(self, loader: KernelLoader, processors: int, max_top_k: int) -> None:
        self._loader = loader
        self._processors = processors
        device = loader.device
        self._inner = torch.full((2, STAGE * max_top_k), -1, dtype=torch.int16, device=device)
        self._begun = torch.zeros(1, dtype=torch.int32, device=device)

    def takes(self, rows: int, top_k: int, experts: PackedExperts, list_bytes: int) -> bool:
        """Whether all that a block adds up fits its shared memory."""
        pairs, groups = rows * top_k, -(-experts.width // TILE // self._processors)
        terms = 2 * TILE * groups * (pairs + rows) + 4 * pairs
        return (
            rows * experts.inner <= STAGE
            and groups <= MAX_GROUPS
            and SORTED_BYTES + terms <= list_bytes
        )

    def moe_w4a16(
        self,
        x: Tensor,
        expert: Tensor,
        weight: Tensor,
        experts: PackedExperts,
        shared: Tensor,
        defines: Mapping[str, str | int],
        threads: int,
        launch: Mapping[str, bool],
    ) -> Tensor:
        """As in Ops, for what `takes` takes."""
        out = torch.empty_like(x)
        kernel = self._loader.get("moe_w4a16_few", "moe_w4a16_few", defines)
        weights = (experts.gate_up, experts.down)
        kernel.launch(
            self._processors,
            threads,
            (out, self._inner, self._begun, x, *weights, expert, weight, shared, expert.numel()),
            shared_bytes=int(defines["SHARED_BYTES"]),
            **launch,
        )
        return out
