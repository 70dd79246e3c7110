"""Launches moe_w4a16_few.cu: a layer's routed experts for one row or two, in one launch.

Nothing waits for the device; all may be captured in a graph. Bits are those of moe_w4a16.cu.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kdray.kernels.loader import KernelLoader
from kdray.kernels.moe_design import FEW_DESIGN, MAX_TOP_K, SORTED_BYTES, THREADS, few_defines
from kdray.kernels.moe_layout import TILE, PackedExperts

# As in the .cu file.
STAGE = 512  # numbers of `inner` that a warp has room for
MAX_GROUPS = 32  # of 32 columns, a block
EMPTY = -1  # a number of `inner` that is not there yet


class CudaMoeFew:
    """The op on one device. Its workspace serves one launch at a time: use it on one stream."""

    def __init__(self, loader: KernelLoader, processors: int, launch: Mapping[str, bool]) -> None:
        """launch: how its blocks come to be resident all at once, as Kernel.launch takes it."""
        self._loader = loader
        self._processors = processors
        self._launch = launch
        shape, device = (2, STAGE * MAX_TOP_K), loader.device
        self._inner = torch.full(shape, EMPTY, dtype=torch.int16, device=device)
        self._begun = torch.zeros(1, dtype=torch.int32, device=device)

    def takes(self, rows: int, top_k: int, experts: PackedExperts) -> bool:
        """Whether all that a block adds up fits its shared memory."""
        pairs, groups = rows * top_k, -(-experts.width // TILE // self._processors)
        terms = 2 * TILE * groups * (pairs + rows) + 4 * pairs
        return (
            rows * experts.inner <= STAGE
            and groups <= MAX_GROUPS
            and SORTED_BYTES + terms <= FEW_DESIGN.list_bytes
        )

    def moe_w4a16(
        self, x: Tensor, expert: Tensor, weight: Tensor, experts: PackedExperts, shared: Tensor
    ) -> Tensor:
        """As in Ops, for what `takes` takes."""
        out = torch.empty_like(x)
        defines = few_defines(experts.width, experts.inner, expert.shape[1])
        kernel = self._loader.get("moe_w4a16_few", "moe_w4a16_few", defines)
        weights = (experts.gate_up, experts.down)
        kernel.launch(
            self._processors,
            THREADS,
            (out, self._inner, self._begun, x, *weights, expert, weight, shared, expert.numel()),
            shared_bytes=FEW_DESIGN.shared_bytes,
            **self._launch,
        )
        return out
