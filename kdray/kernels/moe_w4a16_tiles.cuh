// Which rows go to which expert: as sort_rows.cu left it, or, for a warp's lanes of pairs, sorted by
// every warp for itself, which takes a dozen instructions and no launch. Wide tiles, for many rows,
// have registers for the first way only.
#pragma once

#include "common.cuh"

constexpr int COLUMNS = 8 * COLUMN_TILES;  // rows of x in a tile, columns of the product

// One expert's rows, or some of them.
struct Tile {
    int expert, count, first;
    u32 pairs;  // sorted here: a bit each
};

// What a warp's lane 4 g + t knows of a tile's rows: the pairs of columns 8 j + g.
struct Pairs {
    int of[COLUMN_TILES];

    // The pair of column 8 j + g, for any g; to be called by a whole warp.
    __device__ int at(int j, int g) const { return __shfl_sync(ALL_LANES, of[j], 4 * g); }
};

// Collective functions of a warp.
struct Tiles {
    const int4* table;  // null: sorted here
    const int* sorted;
    int number;
    int expert;          // of the lane's pair
    u32 same, leaders;   // pairs of that expert; the first pairs of each

    __device__ bool are_sorted() const { return COLUMN_TILES > 1 || table != nullptr; }
    __device__ static Tiles of(const int4* table, const int* sorted, const int* num_tiles,
                               const i64* expert, int num_pairs)
    {
        const int lane = lane_id();
        Tiles t;
        t.table = table;
        t.sorted = sorted;
        if (t.are_sorted()) {
            t.number = *num_tiles;
            t.expert = 0;
            t.same = t.leaders = 0;
            return t;
        }
        t.expert = lane < num_pairs ? (int)expert[lane] : -1;
        t.same = __match_any_sync(ALL_LANES, t.expert);
        t.leaders = __ballot_sync(ALL_LANES, t.leads());
        t.number = __popc(t.leaders);
        return t;
    }

    __device__ Tile at(int tile) const
    {
        Tile found;
        if (are_sorted()) {
            const int4 entry = table[tile];
            found = {entry.x, entry.y, entry.z, 0};
        } else {
            const bool mine = leads() && __popc(leaders & lower()) == tile;
            const int lane = __ffs(__ballot_sync(ALL_LANES, mine)) - 1;
            const u32 pairs = __shfl_sync(ALL_LANES, same, lane);
            found = {__shfl_sync(ALL_LANES, expert, lane), __popc(pairs), 0, pairs};
        }
        return found;
    }

    // The pairs of columns 8 j + g; -1 behind the last.
    __device__ Pairs pairs(const Tile& tile) const
    {
        Pairs found;
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            const int column = 8 * j + lane_id() / 4;
            found.of[j] = -1;
            if (column < tile.count)
                found.of[j] = are_sorted() ? sorted[tile.first + column] : bit(tile.pairs, column);
        }
        return found;
    }

private:
    // The place of a word's bit number n from below.
    __device__ static int bit(u32 word, int n)
    {
#pragma unroll 1
        for (; n > 0; --n) word &= word - 1;
        return __ffs(word) - 1;
    }
    __device__ static u32 lower() { return (1u << lane_id()) - 1; }
    __device__ bool leads() const { return expert >= 0 && (same & lower()) == 0; }
};
