"""skinny_gemm against float64, on shapes as models have them and as nobody does.

Used for the kernel on a GPU and for its source on the CPU. Inputs are made on the CPU from a seed;
float64 of the same bf16 numbers decides. Sums may be off by 2^-20 of the sum of the products'
sizes, and are rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdray.kernels import cuda_gemm, reference_gemm
from kdray.kernels.cuda_gemm import CudaGemm
from kdray.kernels.gemm_plan import GemmPlan

SUM_ERROR = 2**-20
BF16_ERROR = 2**-8  # half of the last bit's weight


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def matrix(seed: int, inputs: int, outputs: int, device: torch.device) -> Tensor:
    """[in, out], an output's weights side by side."""
    return drawn(seed, outputs, inputs).to(device).T


def settle(device: torch.device) -> None:
    """Weights are fetched ahead of the launch in front, so they must have been written."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def assert_near(found: Tensor, exact: Tensor, sizes: Tensor) -> None:
    """sizes: the sums of the products' absolute values."""
    rounding = BF16_ERROR * exact.abs() if found.dtype == torch.bfloat16 else 2**-23 * exact.abs()
    off = (found.double() - exact).abs()
    assert off.le(1.01 * rounding + SUM_ERROR * sizes).all(), (off / sizes).max()


def check_linear(
    gemm: CudaGemm,
    tokens: int,
    inputs: int,
    outputs: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    add: bool = False,
    gap: int = 0,
) -> None:
    """x lies `gap` numbers inside rows that are wider by as much."""
    device = gemm.device
    wide = drawn(tokens, tokens, inputs + 2 * gap).to(device)
    x, weight = wide[:, gap : gap + inputs], matrix(7, inputs, outputs, device)
    more = drawn(3, tokens, outputs).to(device, dtype) if add else None
    settle(device)
    assert cuda_gemm.takes(x, weight)
    found = gemm.linear(x, weight, dtype=dtype, add=more)
    assert found.shape == (tokens, outputs) and found.dtype == dtype
    exact = x.double() @ weight.double()
    sizes = x.double().abs() @ weight.double().abs()
    if more is not None:
        exact, sizes = exact + more.double(), sizes + more.double().abs()
    assert_near(found, exact, sizes)


def check_gated(gemm: CudaGemm, tokens: int, inputs: int, inner: int) -> None:
    """As the plain product followed by swiglu, to a rounding here and there."""
    device = gemm.device
    x, weight = drawn(1, tokens, inputs).to(device), matrix(2, inputs, 2 * inner, device)
    weight = (weight.T * inputs**-0.5).T
    settle(device)
    found = gemm.gated_linear(x, weight)
    gate, up = (x.double() @ weight.double()).chunk(2, dim=-1)
    exact = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(found.double(), exact, rtol=2**-6, atol=1e-3)
    wanted = reference_gemm.gated_linear(x, weight)
    assert (found != wanted).double().mean() < 0.02


def check_pair(gemm: CudaGemm, tokens: int, inputs: int, outputs: int, inner: int) -> None:
    """Both products of one launch are what each is by itself, to the bit, whatever the dtype."""
    device = gemm.device
    x = drawn(1, tokens, inputs + 16).to(device)[:, 8 : inputs + 8]
    weight, gate_up = matrix(2, inputs, outputs, device), matrix(3, inputs, 2 * inner, device)
    gate_up = (gate_up.T * inputs**-0.5).T
    settle(device)
    assert gemm._pair_plan(x, weight, gate_up) is not None
    for dtype in (torch.float32, None):
        found, gates = gemm.linear_and_gated(x, weight, gate_up, dtype=dtype)
        assert torch.equal(found, gemm.linear(x, weight, dtype=dtype))
        assert found.dtype == (dtype or x.dtype)
        assert torch.equal(gates, gemm.gated_linear(x, gate_up))


def check_heads(gemm: CudaGemm, tokens: int, heads: int, inputs: int, outputs: int) -> None:
    """Queries are the front of wider rows, results go to the front of wider rows."""
    device = gemm.device
    x = drawn(tokens, tokens, heads, inputs + 64).to(device)[..., :inputs]
    weight = drawn(5, heads, outputs, inputs).to(device).transpose(1, 2)
    wide = torch.full((tokens, heads, outputs + 16), 7.0, dtype=torch.bfloat16, device=device)
    settle(device)
    out = gemm.per_head(x, weight, wide[..., :outputs])
    assert out.data_ptr() == wide.data_ptr()
    exact = torch.einsum("tha,hab->thb", x.double(), weight.double())
    sizes = torch.einsum("tha,hab->thb", x.double().abs(), weight.double().abs())
    assert_near(out, exact, sizes)
    assert (wide[..., outputs:] == 7).all()
    assert torch.equal(gemm.per_head(x, weight), out)


def check_alone(gemm: CudaGemm, tokens: int, inputs: int, outputs: int) -> None:
    """A row's bits are the same alone and in any batch it is part of."""
    device = gemm.device
    x, weight = drawn(11, tokens, inputs).to(device), matrix(12, inputs, outputs, device)
    settle(device)
    whole = gemm.linear(x, weight, dtype=torch.float32)
    for first, last in ((0, 1), (tokens - 1, tokens), (0, 8), (3, 12), (tokens - 17, tokens)):
        part = gemm.linear(x[first:last], weight, dtype=torch.float32)
        assert torch.equal(part, whole[first:last])


def check_plans(gemms: dict[GemmPlan, CudaGemm], tokens: int, inputs: int, outputs: int) -> None:
    """Plans of as many runs give the same bits."""
    found = []
    for gemm in gemms.values():
        x = drawn(21, tokens, inputs).to(gemm.device)
        weight = matrix(22, inputs, outputs, gemm.device)
        settle(gemm.device)
        found.append(gemm.linear(x, weight, dtype=torch.float32))
    assert all(torch.equal(found[0], other) for other in found[1:])
