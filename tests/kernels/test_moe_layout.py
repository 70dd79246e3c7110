"""INT4 experts repacked for moe_w4a16.cu: every nibble where the kernel looks, and back."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels.moe_layout import (
    STEP_BYTES,
    Int4,
    PackedExperts,
    pack,
    unpack,
    unwoven,
    woven,
)
from tests.kernels.moe_cases import drawn_int4

CPU = torch.device("cpu")


def same(a: Int4, b: Int4) -> bool:
    return torch.equal(a.q, b.q) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (3, 32, 128), (2, 2, 96, 64)], ids=str)
def test_unpacking_gives_what_was_packed(shape: tuple[int, ...]) -> None:
    weight = drawn_int4(*shape, device=CPU)
    tiles = pack(weight)
    assert tiles.shape == (*shape[:-2], shape[-2] // 32, shape[-1] // 32, STEP_BYTES)
    assert same(unpack(tiles), weight)


def test_a_lane_finds_its_fragments() -> None:
    """The layout by its definition, nibble by nibble."""
    weight = drawn_int4(64, 96, device=CPU)
    tiles = pack(weight)
    for out in range(64):
        for column in range(96):
            g, m, h = out % 32 // 4, out // 2 % 2, out % 2
            t, k, b, e = column % 32 // 8, column // 4 % 2, column // 2 % 2, column % 2
            tile = tiles[out // 32, column // 32].tolist()
            at = 16 * (4 * g + t) + 4 * (2 * m + k)
            word = int.from_bytes(bytes(tile[at : at + 4]), "little")
            nibble = word >> 4 * (4 * e + 2 * b + h) & 0xF
            assert nibble - 8 == int(weight.q[out, column])


def test_scales_lie_behind_in_order() -> None:
    weight = drawn_int4(32, 64, device=CPU)
    for group in range(2):
        scales = pack(weight)[0, group, 512:].contiguous().view(torch.bfloat16)
        assert torch.equal(scales, weight.scale[:, group])


def test_gate_and_up_are_woven_by_twos() -> None:
    gate, up = (drawn_int4(3, 32, 64, device=CPU) for _ in range(2))
    both = woven(gate, up)
    rows = [gate.q[:, 0], gate.q[:, 1], up.q[:, 0], up.q[:, 1], gate.q[:, 2]]
    assert torch.equal(both.q[:, :5], torch.stack(rows, dim=1))
    assert all(map(same, unwoven(both), (gate, up)))


def test_a_rank_packs_its_slice_and_gets_the_same_tiles() -> None:
    """Two ranks' tiles are halves of the whole's."""
    gate, up = (drawn_int4(64, 96, device=CPU) for _ in range(2))
    down = drawn_int4(96, 64, device=CPU)
    whole = PackedExperts.empty(1, 96, 64, CPU)
    whole.put(0, gate, up, down)
    for rank in range(2):
        rows, groups = slice(32 * rank, 32 * rank + 32), slice(rank, rank + 1)
        part = PackedExperts.empty(1, 96, 32, CPU)
        part.put(
            0,
            Int4(gate.q[rows], gate.scale[rows]),
            Int4(up.q[rows], up.scale[rows]),
            Int4(down.q[:, rows], down.scale[:, groups]),
        )
        assert torch.equal(part.gate_up, whole.gate_up[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(part.down, whole.down[:, :, groups])
        assert (part.num_experts, part.width, part.inner) == (1, 96, 32)
