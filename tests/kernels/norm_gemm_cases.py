"""norm_linear against the two launches it stands for, to the bit.

Used for the kernel on a GPU and for its source on the CPU. Inputs are made on the CPU from a seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdray.kernels import cuda_norm_gemm
from kdray.kernels.cuda import CudaOps
from tests.kernels.fused_cases import SomeNorm, some_norm
from tests.kernels.gemm_cases import drawn, matrix, settle


def latent_rows(tokens: int, width: int, gap: int, device: torch.device) -> Tensor:
    """The beginning of rows that are wider by `gap`; sizes differ from row to row, one is zero, and
    one's squares are no numbers."""
    x = drawn(tokens, tokens, width + gap).to(device)[:, :width]
    x *= torch.logspace(-3, 3, tokens, device=device).bfloat16()[:, None]
    x[:, 1] *= 50
    if tokens > 4:
        x[1] = 0
        x[3, width // 2] = torch.inf
    return x


def one_by_one(ops: CudaOps, x: Tensor, norm: SomeNorm, weight: Tensor) -> Tensor:
    return ops.linear(ops.rms_norm(x, norm), weight)


def check_normed(ops: CudaOps, tokens: int, width: int, outputs: int, gap: int = 8) -> None:
    device = ops.device
    x, weight = latent_rows(tokens, width, gap, device), matrix(7, width, outputs, device)
    norm = some_norm(width, torch.bfloat16, device)
    settle(device)
    assert cuda_norm_gemm.takes(ops._gemm, x, norm, weight)
    before = x.clone()
    found, wanted = ops.norm_linear(x, norm, weight), one_by_one(ops, x, norm, weight)
    assert found.shape == (tokens, outputs)
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
    assert torch.equal(x, before)
    sound = torch.arange(tokens, device=device) % 5 != 3 if tokens > 4 else slice(None)
    assert found[sound].isfinite().all() and found[0].any()


def check_alone(ops: CudaOps, tokens: int, width: int, outputs: int) -> None:
    """A row's bits are the same alone and in any batch, by one launch or by two."""
    device = ops.device
    x, weight = drawn(3, tokens, width).to(device), matrix(4, width, outputs, device)
    norm = some_norm(width, torch.bfloat16, device)
    settle(device)
    whole = ops.norm_linear(x, norm, weight)
    for first, last in ((0, 1), (2, 5), (0, 8), (tokens - 3, tokens), (0, tokens - 1)):
        assert torch.equal(ops.norm_linear(x[first:last], norm, weight), whole[first:last])


def check_order(ops: CudaOps, width: int) -> None:
    """Rows whose norm shows in which order a row's squares are added up: numbers that stand so near
    a half of bfloat16's place that a last bit of the scale decides. Each output is one of them."""
    device = ops.device
    norm = SomeNorm(torch.ones(width).bfloat16().to(device), torch.tensor(1e-6, device=device))
    x = rows_near_a_half(norm, width)
    found = [normed(x, norm, backwards) for backwards in (False, True)]
    columns = (found[0] != found[1]).nonzero()[:, 1]
    weight = torch.zeros(-len(columns) // 8 * -8, width, dtype=torch.bfloat16)
    weight[torch.arange(len(columns)), columns] = 1
    x, weight = x.to(device), weight.to(device).T
    settle(device)
    assert cuda_norm_gemm.takes(ops._gemm, x, norm, weight)
    picked = ops.norm_linear(x, norm, weight)[:, : len(columns)].cpu()
    assert torch.equal(picked, ops.rms_norm(x, norm).cpu()[:, columns])
    assert not torch.equal(picked, found[1][:, columns])


def rows_near_a_half(norm: SomeNorm, width: int, count: int = 8) -> Tensor:
    """So many rows that the order decides. Of 4,096 they are none to a few, by a CPU's own sums, so
    draws go on until there are enough."""
    found: list[Tensor] = []
    seed = 0
    while len(found) < count:
        seed += 1
        x = drawn(seed, 4096, width)
        decided = (normed(x, norm, False) != normed(x, norm, True)).any(dim=1)
        found += x[decided].split(1)
    return torch.cat(found[:count])


def normed(x: Tensor, norm: SomeNorm, backwards: bool) -> Tensor:
    """A vector of 8 by itself, a warp's in a tree, then warps in their order, or against it."""
    width, square = x.shape[1], x.float().square()
    vectors = torch.zeros(len(x), -(-width // 256) * 32)
    for i in range(8):
        vectors[:, : width // 8] += square[:, i::8]
    parts = vectors.view(len(x), -1, 32)
    while parts.shape[2] > 1:
        half = parts.shape[2] // 2
        parts = parts[..., :half] + parts[..., half:]
    places = list(range(parts.shape[1]))
    total = torch.zeros(len(x))
    for place in reversed(places) if backwards else places:
        total += parts[:, place, 0]
    mean = norm.eps.cpu() + total * (1 / width)
    if norm.eps.is_cuda:  # which rounds that once
        inverse = torch.tensor(1 / width, dtype=torch.float32).double()
        mean = (norm.eps.cpu().double() + total.double() * inverse).float()
    scale = 1 / mean.sqrt()
    return (x * scale[:, None]).bfloat16()
