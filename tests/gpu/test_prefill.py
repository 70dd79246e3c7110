"""torch's fused kernel behind attend_block: its layout, its log-sum-exp, its causal corner."""

from __future__ import annotations

import pytest
import torch

from kdray.model.prefill import attend_block, merge_states

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "nope", "value"), [(8, 192, 128), (4, 48, 32)])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 257, 1500])
def test_the_fused_block_equals_a_softmax(
    heads: int, nope: int, value: int, rows: int, causal: bool, device: torch.device
) -> None:
    query, key = torch.randn(2, heads, rows, nope, device=device).bfloat16()
    values = torch.randn(heads, rows, value, device=device).bfloat16()
    fused = attend_block(query, key, values, 0.1, causal=causal)
    plain = attend_block(query.float(), key.float(), values.float(), 0.1, causal=causal)
    torch.testing.assert_close(fused.lse, plain.lse, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(fused.mixed, plain.mixed, rtol=2e-2, atol=2e-2)


def test_blocks_of_any_size_merge_to_the_whole(device: torch.device) -> None:
    query, key = torch.randn(2, 8, 1100, 192, device=device).bfloat16()
    values = torch.randn(8, 1100, 128, device=device).bfloat16()
    whole = attend_block(query, key, values, 0.1, causal=False)
    for cut in (1, 33, 512, 1024, 1099):
        parts = [
            attend_block(query, key[:, part], values[:, part], 0.1, causal=False)
            for part in (slice(0, cut), slice(cut, None))
        ]
        merged = merge_states(parts[0], parts[1])
        torch.testing.assert_close(merged.mixed, whole.mixed, rtol=2e-2, atol=2e-2)
