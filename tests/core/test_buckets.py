from __future__ import annotations

import pytest

from kdray.core.buckets import pass_sizes


@pytest.mark.parametrize(("chunk", "sizes"), [
    (512, (32, 64, 128, 256, 512)), (4096, (32, 64, 128, 256, 512)), (300, (32, 64, 128, 256, 300)),
    (64, (32, 64)), (33, (32, 33)), (32, (32,)), (7, (7,)), (1, (1,)),
])  # fmt: skip
def test_a_chunk_fits_a_pass_up_to_a_point(chunk: int, sizes: tuple[int, ...]) -> None:
    assert pass_sizes(chunk) == sizes
