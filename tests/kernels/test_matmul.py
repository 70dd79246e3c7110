"""x @ weight by way of float32 is rounded once."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels import matmul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(), (3,)], ids=str)
def test_it_is_the_product_rounded_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: tuple[int, ...]
) -> None:
    monkeypatch.setattr(matmul, "_HAS_16_BIT_PRODUCTS", False)
    x, weight = torch.randn(*heads, 7, 96).to(dtype), torch.randn(*heads, 96, 40).to(dtype)
    exact = x.double() @ weight.double()
    found = matmul.matmul(x, weight)
    assert found.dtype == dtype
    # Half a unit in the last place, and what the sums' own rounding may add.
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 2e-5
    assert (found.double() - exact).abs().le(bound).all()
