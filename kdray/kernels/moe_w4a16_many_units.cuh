// How moe_w4a16_many's work is dealt, and the cursors over it. A unit is one tile of rows by one slice
// of outputs; blocks take them in turn. What a block copies runs ahead of what it multiplies, from
// unit to unit, so each has a cursor of its own.
#pragma once

#include "moe_w4a16_int4.cuh"

constexpr int WARPS = 8;  // of a block: 32 outputs each
constexpr int THREADS = WARPS * WARP;
constexpr int ROW_TILES = 8;
constexpr int ROWS = 8 * ROW_TILES;  // of a tile, at most
constexpr int STAGE_STEPS = 2;       // steps (of 32 inputs) between two meetings of the block
static_assert(WIDTH % STEP == 0 && INNER % STEP == 0, "whole groups");

// What the two products differ in.
template <bool UP>
struct Product {
    static constexpr int INPUTS = UP ? WIDTH : INNER;
    static constexpr int STEPS = INPUTS / STEP;
    static constexpr int STAGES = (STEPS + STAGE_STEPS - 1) / STAGE_STEPS;
    static constexpr bool WHOLE = STEPS % STAGE_STEPS == 0;  // every stage is full
    static constexpr int GROUPS = UP ? INNER / 16 : WIDTH / STEP;  // of 32 outputs
    static constexpr int SLICES = (GROUPS + WARPS - 1) / WARPS;
    static constexpr bool ALL_WARPS = GROUPS % WARPS == 0;  // have outputs in every slice
    // Steps that one sum takes before it goes on the total: moe_w4a16's warps take so many each.
    static constexpr int FEW_WARPS = 16;
    static constexpr int SHARE = (STEPS + FEW_WARPS - 1) / FEW_WARPS;

    __device__ static int steps(int stage)
    {
        return WHOLE ? STAGE_STEPS : min(STAGE_STEPS, STEPS - stage * STAGE_STEPS);
    }
};

// One expert's rows, or some of them, side by side in the order of the experts; by sort_rows_count.
struct Tile {
    u32 packed;

    __device__ int expert() const { return (int)(packed >> 22); }
    __device__ int count() const { return (int)(packed >> 16 & 63) + 1; }
    __device__ int first() const { return (int)(packed & 0xffff); }
};

// All units of a launch; where they are no more than LISTED_TILES, a block keeps the tiles in shared
// memory. The up product's go tile by tile, as slices read the same rows of x; the
// down product's slice by slice, so that some columns of all pairs are complete early.
template <bool UP>
struct Units {
    const u32* table;
    SharedAddress list;
    int tiles;

    // To be called by the whole block, which is to meet before it looks anything up.
    __device__ void open(u32 (&listed)[LISTED_TILES])
    {
        list = same_in_warp(shared_address(listed));
        if (tiles > LISTED_TILES) return;
        for (int i = (int)threadIdx.x; i < tiles; i += THREADS) listed[i] = table[i];
    }
    __device__ int number() const { return tiles * Product<UP>::SLICES; }
    __device__ int slice(int unit) const
    {
        return UP ? unit % Product<UP>::SLICES : (int)((u32)unit / (u32)tiles);
    }
    __device__ int count_or_none(int unit) const
    {
        return unit < number() ? tile(unit).count() : 0;
    }
    __device__ Tile tile(int unit) const
    {
        const int i = UP ? unit / Product<UP>::SLICES : (int)((u32)unit % (u32)tiles);
        return {same_in_warp(tiles > LISTED_TILES ? table[i] : load_word(list + 4 * i))};
    }
};

// A place in a block's work: a stage of a unit.
template <bool UP>
struct Cursor {
    int unit, stage;

    __device__ void open()
    {
        unit = (int)blockIdx.x;
        stage = 0;
    }
    __device__ int next_unit() const { return unit + (int)gridDim.x; }
    __device__ bool last_stage() const { return stage == Product<UP>::STAGES - 1; }
    __device__ bool there(const Units<UP>& units) const { return unit < units.number(); }
    // To the next stage; true where it is of another unit.
    __device__ bool advance()
    {
        const bool last = last_stage();
        stage = last ? 0 : stage + 1;
        if (last) unit = next_unit();
        return last;
    }
};
