"""How verify_attention's work is cut and dealt out: the oracle of plan_attention.cu, in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PIECE_FIELDS = (
    *("request", "first_row", "cached", "known", "first", "rows", "keys"),
    *("begin", "end", "count", "first_block", "number", "block"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCosts:
    """plan_attention.cu's parameters of the same names."""

    tile_rows: int
    small_rows: int
    small_cost: int
    few_rows: int
    few_cost: int
    twice_cost: int
    step: int
    step_cost: int
    eight_cost: int
    setup_cost: int
    least: int


@dataclass(frozen=True, slots=True)
class _WorkTile:
    """One tile of plan_attention, and what it costs in one piece."""

    request: int
    first: int
    rows: int
    keys: int
    steps: int
    step_cost: int
    cost: int


def plan_attention(
    row_start: Sequence[int],
    num_cached: Sequence[int],
    num_known: Sequence[int],
    num_nodes: Sequence[int],
    *,
    heads: int,
    blocks: int,
    costs: PlanCosts,
) -> tuple[list[dict[str, int]], list[int]]:
    """Pieces, as PIECE_FIELDS names them, and for each block where its pieces start.

    The oracle of plan_attention.cu, whose header says how the work is dealt out. Page tables reach
    and masks are wide enough.
    """
    lengths = list(zip(row_start, num_cached, num_known, num_nodes, strict=False))
    tiles = _cut(lengths, heads, blocks, costs)
    share = _share(tiles, blocks, costs)
    whole = [_blocks_for(tile, costs, share) for tile in tiles]
    if sum(max(1, count) for count in whole) <= blocks:
        whole = [max(1, count) for count in whole]
    spans: list[tuple[int, _WorkTile, int, int, int, int, int]] = []
    block = 0
    for tile, count in zip(tiles, whole, strict=True):
        for number in range(count):
            begin, end = (tile.steps * n // count for n in (number, number + 1))
            spans.append((block + number, tile, begin, end, count, block, number))
        block += count
    spans += _small_spans(tiles, whole, block, costs, share)
    pieces = [_piece(lengths, *span) for span in spans]
    start = [sum(piece["block"] < b for piece in pieces) for b in range(blocks + 1)]
    return pieces, start


def _cut(
    lengths: Sequence[tuple[int, int, int, int]], heads: int, blocks: int, costs: PlanCosts
) -> list[_WorkTile]:
    """The tiles of all requests, as many rows in each as the work is worth."""

    def within(tiles: list[_WorkTile], cost: int) -> bool:
        return sum(tile.cost for tile in tiles) < cost * blocks

    for rows, cost in ((costs.few_rows, costs.few_cost), (2 * costs.few_rows, costs.twice_cost)):
        if rows < costs.small_rows:
            few = _work_tiles(lengths, heads, costs, rows)
            if within(few, cost) and len(few) <= blocks:
                return few
    tiles = _work_tiles(lengths, heads, costs, costs.tile_rows)
    if costs.small_rows < costs.tile_rows and within(tiles, costs.small_cost):
        return _work_tiles(lengths, heads, costs, costs.small_rows)
    return tiles


def _work_tiles(
    lengths: Sequence[tuple[int, int, int, int]], heads: int, costs: PlanCosts, tile_rows: int
) -> list[_WorkTile]:
    tiles = []
    for request, (_, cached, known, nodes) in enumerate(lengths):
        packed = (known + nodes - 1) * heads if known else 0
        eights = -(-packed // 8)
        count = -(-eights // (tile_rows // 8))
        for number in range(count):
            first = 8 * (eights * number // count)
            last = min(8 * (eights * (number + 1) // count), packed)
            keys = cached + (last - 1) // heads + 1
            steps = -(-keys // costs.step)
            step_cost = costs.step_cost + costs.eight_cost * -(-(last - first) // 8)
            cost = costs.setup_cost + steps * step_cost
            tiles.append(_WorkTile(request, first, last - first, keys, steps, step_cost, cost))
    return tiles


def _blocks_for(tile: _WorkTile, costs: PlanCosts, share: int) -> int:
    """Blocks of its own, 0 for a small tile."""
    if tile.cost > share:
        return -(-(tile.cost - costs.setup_cost) // (share - costs.setup_cost))
    return int(8 * tile.cost > 7 * share)


def _share(tiles: Sequence[_WorkTile], blocks: int, costs: PlanCosts) -> int:
    total = sum(tile.cost for tile in tiles)
    lowest = max(-(-total // blocks), costs.least)
    for i in range(32):
        share = min((lowest * (16 + i % 16) + 15) // 16 << i // 16, 0x7FFFFFFF)
        whole = [_blocks_for(tile, costs, share) for tile in tiles]
        small = sum(tile.cost for tile, n in zip(tiles, whole, strict=True) if n == 0)
        if sum(whole) + -(-small // share) <= blocks:
            return share
    return max(total, costs.least)


def _small_spans(
    tiles: Sequence[_WorkTile],
    whole: Sequence[int],
    first_block: int,
    costs: PlanCosts,
    share: int,
) -> Iterator[tuple[int, _WorkTile, int, int, int, int, int]]:
    """Small tiles end to end, cut at every share."""
    begin = 0
    for tile, count in zip(tiles, whole, strict=True):
        if count:
            continue
        cut, little = (begin // share + 1) * share, costs.setup_cost + tile.step_cost
        block = first_block + begin // share
        if begin + tile.cost < cut + little:
            yield block, tile, 0, tile.steps, 1, block, 0
        elif cut < begin + little:
            yield block + 1, tile, 0, tile.steps, 1, block + 1, 0
        else:
            head = (cut - begin - costs.setup_cost) // tile.step_cost
            yield block, tile, 0, head, 2, block, 0
            yield block + 1, tile, head, tile.steps, 2, block, 1
        begin += tile.cost


def _piece(
    lengths: Sequence[tuple[int, int, int, int]],
    block: int,
    tile: _WorkTile,
    begin: int,
    end: int,
    count: int,
    first_block: int,
    number: int,
) -> dict[str, int]:
    first_row, cached, known, _ = lengths[tile.request]
    values = (
        *(tile.request, first_row, cached, known, tile.first, tile.rows, tile.keys),
        *(begin, end, count, first_block, number, block),
    )
    return dict(zip(PIECE_FIELDS, values, strict=True))
