// Which rows go to which expert: as sort_rows.cu left it or, of few pairs, sorted by every block for
// itself, which takes no launch. Where it fits, a block
// keeps all of it in shared memory: a look there takes 30 cycles, one past L1 takes 600. Wide tiles,
// for many rows, have no registers to do both.
#pragma once

#include "moe_w4a16_sort.cuh"

// What a warp's lane 4 g + t knows of a tile's rows: the pairs of columns 8 j + g. Columns without one
// have the first column's: they cost nothing, and nobody looks at what comes of them.
struct Pairs {
    int of[COLUMN_TILES];
    int count;

    // The pair of column 8 j + g, for any g, or -1; to be called by a whole warp.
    __device__ int at(int j, int g) const
    {
        const int pair = __shfl_sync(ALL_LANES, of[j], 4 * g);
        return 8 * j + g < count ? pair : -1;
    }
};

struct Tiles {
    SharedAddress entries, listed_pairs;
    const int4* table;
    const int* sorted;
    int number;
    bool listed;  // in shared memory

    // To be called by the whole block, which is to meet before it looks anything up.
    __device__ static Tiles of(unsigned char* list, const int4* table, const int* sorted,
                               const int* num_tiles, const i64* expert, int most, int num_pairs)
    {
        Tiles t;
        t.entries = same_in_warp(shared_address(list));
        t.listed_pairs = t.entries + 4 * most;
        t.table = table;
        t.sorted = sorted;
        t.listed = COLUMN_TILES <= 2 && 4 * most + 2 * num_pairs <= LIST_BYTES;
        if (COLUMN_TILES == 1 && table == nullptr) {
            t.number = sorted_by_block(list, expert, num_pairs);
            return t;
        }
        t.number = same_in_warp(*num_tiles);
        if (t.listed) copy(list, table, sorted, most, num_pairs);
        return t;
    }

    // Shuffles tell the compiler that all of a warp look up the same.
    __device__ Tile at(int tile) const
    {
        if (listed) return Tile::unpacked(same_in_warp(load_word(entries + 4 * tile)));
        const int4 entry = table[tile];
        return {same_in_warp(entry.x), same_in_warp(entry.y), same_in_warp(entry.z)};
    }

    __device__ Pairs pairs(const Tile& tile) const
    {
        Pairs found;
        found.count = tile.count;
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            const int column = 8 * j + lane_id() / 4;
            const int place = tile.first + (column < tile.count ? column : 0);
            if (listed)
                found.of[j] = (int)load_half(listed_pairs + 2 * place);
            else
                found.of[j] = sorted[place];
        }
        return found;
    }

private:
    // All there is room for, so that nothing waits for the number of tiles.
    __device__ static void copy(unsigned char* list, const int4* table, const int* sorted, int most,
                                int num_pairs)
    {
        u32* const entries = (u32*)list;
        u16* const pairs = (u16*)(list + 4 * most);
        // At most a tile a pair.
#pragma unroll 2
        for (int i = (int)threadIdx.x; i < num_pairs; i += (int)blockDim.x) {
            pairs[i] = (u16)sorted[i];
            if (i >= most) continue;
            const int4 entry = table[i];
            entries[i] = Tile{entry.x, entry.y, entry.z}.packed();
        }
    }
};
