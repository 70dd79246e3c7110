"""A run in a CUDA graph against launches of their own, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.kernels.gemm_cases import drawn

Run = Callable[[], Sequence[Tensor]]


def check_replays(run: Run, beside: Run, inputs: Sequence[Tensor]) -> None:
    """The graph of `run` gives at every replay what `beside` does; inputs are drawn anew before."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for seed in range(20):
        for i, x in enumerate(inputs):
            x.copy_(drawn(100 * i + seed, *x.shape))
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, beside()))
