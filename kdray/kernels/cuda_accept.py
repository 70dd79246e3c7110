"""accept_path.cu: the target's way through each tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths, DraftTrees
from kdray.kernels.checks import check
from kdray.kernels.loader import Kernel, KernelLoader

MAX_NODES = 1025  # root counted
WARP = 32


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """Accepted paths, and which trees were none.

    malformed   [R] int32: 1 where a tree's count or parents cannot be; its path is the root alone
    """

    paths: AcceptedPaths
    malformed: Tensor


def accept_kernel(loader: KernelLoader) -> Kernel:
    return loader.get("accept_path", "accept_path")


@check(
    trees={"token": "R N int32", "parent": "R N int32", "num_nodes": "R int32"},
    target="R N int32",
)
def accept_paths(loader: KernelLoader, trees: DraftTrees, target: Tensor, depth: int) -> Acceptance:
    """Follow the target's tokens [R, N] through each tree; paths hold 1 + depth nodes.

    Waits for nothing, and may be captured in a graph. Raises ValueError where N > 1025.
    """
    requests, nodes = target.shape
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"accept_paths takes trees of 1 to {MAX_NODES} nodes, not {nodes}")
    if depth < 0:
        raise ValueError(f"a path cannot be {depth} drafts deep")
    path = target.new_empty(requests, 1 + depth)
    length, bonus, malformed = torch.empty(
        3, requests, dtype=torch.int32, device=target.device
    ).unbind()
    if requests:
        threads = max(WARP, -(-(nodes - 1) // WARP) * WARP)
        outputs = (path, length, bonus, malformed)
        inputs = (trees.token, trees.parent, target, trees.num_nodes)
        sizes = (nodes, depth)
        accept_kernel(loader).launch(requests, threads, (*outputs, *inputs, *sizes), overlap=True)
    paths = AcceptedPaths(node=path, length=length, bonus=bonus)
    return Acceptance(paths=paths, malformed=malformed)
