// What moe_w4a16_few does otherwise: a block has its columns of the output for all experts, and tells
// the others nothing but `inner`.
#pragma once

#include "moe_w4a16_product.cuh"
#include "relaxed.cuh"

static_assert(COLUMN_TILES == 1 && PARTS == 1, "of few rows");

constexpr int STAGE = 8 * WARP * 2;         // numbers that a warp has room for: its part of a buffer
constexpr int FEW_INNER = STAGE * MAX_TOP_K;  // numbers of `inner` at most, of which there are two
constexpr u32 EMPTY = 0xffffffffu;            // two numbers that are not there: no bf16 is rounded to

#ifdef __CUDACC__

// One more, and 0 after `last`.
__device__ __forceinline__ void count_round(u32* counter, u32 last)
{
    asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(last) : "memory");
}
__device__ __forceinline__ void wait_a_while(bool longer)
{
    if (longer) asm volatile("nanosleep.u32 200;" ::: "memory");
}

#else

inline void wait_a_while(bool) { simt::wait_for_other_blocks(); }
inline void count_round(u32* counter, u32 last) { *counter = *counter >= last ? 0 : *counter + 1; }

#endif

// Whether one of eight is not there: whether a half of ~word is 0.
__device__ __forceinline__ u32 gaps(u32 word) { return (~word - 0x00010001u) & word & 0x80008000u; }
__device__ __forceinline__ bool has_gap(const uint4& v)
{
    return (gaps(v.x) | gaps(v.y) | gaps(v.z) | gaps(v.w)) != 0;
}

// Eight numbers a lane that asks, when other blocks have written them all; for a whole warp. Each says
// of itself that it is there, so nothing orders one after another. Only gaps are looked at again,
// and seldom while there is nothing else: a block without a first half begins long before.
__device__ __forceinline__ uint4 load_filled(const u16* from, bool asks)
{
    const u32 asking = __ballot_sync(ALL_LANES, asks);
    uint4 v{};
    for (bool gap = asks;;) {
        if (gap) v = load_relaxed((const uint4*)from);
        gap = gap && has_gap(v);
        const u32 waiting = __ballot_sync(ALL_LANES, gap);
        if (waiting == 0) return v;
        wait_a_while(waiting == asking);
    }
}

// Launches take turns at two of `inner`: each empties the one that the next will fill. Which one is
// whose shows in the number of blocks that have begun, modulo those of two launches: a block adds
// itself when it has looked, so that all of a launch see the same.
struct Turn {
    u16* own;
    u16* other;

    __device__ static Turn of(u16* inner, bool second)
    {
        return {inner + (second ? FEW_INNER : 0), inner + (second ? 0 : FEW_INNER)};
    }
    // The last blocks, which have least to do.
    __device__ void empty_other() const
    {
        const int begin = (int)((gridDim.x - 1 - blockIdx.x) * THREADS + threadIdx.x);
        for (int i = begin; i < FEW_INNER / 8; i += (int)gridDim.x * THREADS)
            ((uint4*)other)[i] = {EMPTY, EMPTY, EMPTY, EMPTY};
    }
};

// Where what is added up goes, whose readers look at itself.
struct FilledInner {
    static constexpr bool COUNTED = false;
    u16* rows;

    __device__ void put(int pair, int column, u16 value) const
    {
        store_relaxed(rows + pair * INNER + column, value);
    }
    __device__ void complete(const Unit&) const {}
};

// The first half is dealt as ever. In the second a block has groups of 32 columns, each the grid
// after the one before, of all tiles: a warp takes every 16th of its units. Blocks with less of the
// first half have more of it.
struct OwnedUnits : Units {
    int groups;  // of the block

    __device__ void count()
    {
        const int blocks = (int)gridDim.x;
        warp = same_in_warp((int)threadIdx.x / WARP);
        num_first = shares_of(tiles.number * SLICES, blocks, (int)blockIdx.x);
        groups = shares_of(WIDE_STEPS, blocks, group(0));
        num_all = num_first + shares_of(groups * tiles.number, WARPS, warp);
    }
    // The number of one of the block's among all.
    __device__ static int group(int own) { return (int)(gridDim.x - 1 - blockIdx.x + own * gridDim.x); }

    // Of the second half: the part is the block's own.
    __device__ Unit at(int i) const
    {
        if (is_first(i)) return Units::at(i);
        const u32 unit = (u32)(warp + (i - num_first) * WARPS), part = unit / (u32)tiles.number;
        return {(int)(unit - part * tiles.number), (int)part};
    }
    __device__ const unsigned char* weights(int i) const
    {
        if (is_first(i)) return Units::weights(i);
        const Unit unit = at(i);
        const i64 expert = tiles.at(unit.tile).expert;
        return down + (expert * WIDE_STEPS + group(unit.part)) * INNER_STEPS * STEP_BYTES;
    }
};

// A tile's rows of `inner` in the warp's own shared memory, where its part of the first half was.
struct Staged {
    const Adder<FilledInner>& adder;
    u16* own;
    int tile;  // -1: none

    __device__ bool knows(const OwnedUnits& units, int i) const { return units.at(i).tile == tile; }
    __device__ const u16* rows() const { return own; }
    __device__ static int row(const Pairs& pairs, int j)
    {
        const int column = 8 * j + lane_id() / 4;
        return column < pairs.count ? column : 0;
    }
    __device__ void wait_for(const OwnedUnits& units, int i)
    {
        const int wanted = units.at(i).tile;
        if (wanted == tile) return;
        tile = wanted;
        adder.wait_until_free();
        const Pairs pairs = units.pairs({wanted, 0});
        __syncwarp();  // nobody reads the rows that were there
        for (int row = 0; row < pairs.count; ++row) {
            const u16* const from = adder.inner.rows + pairs.at(0, row) * INNER;
#pragma unroll 1
            for (int begin = 0; begin < INNER; begin += WARP * 8) {
                const int at = begin + lane_id() * 8;
                const uint4 eight = load_filled(from + at, at < INNER);
                if (at < INNER) *(uint4*)(own + row * INNER + at) = eight;
            }
        }
        __syncwarp();
    }
};
static_assert(INNER <= STAGE, "a row at least");

// What the block's columns are the sum of, in its list behind the sorted pairs.
struct Terms {
    static constexpr int AT = 8 * MOST_UNSORTED + 16;
    int groups, num_pairs;
    u16* given;     // [num_pairs, groups, STEP]: of a pair's expert
    u16* shared;    // [rows, groups, STEP]
    float* weight;  // [num_pairs]

    __device__ static Terms in(unsigned char* list, int groups, int num_pairs)
    {
        u16* const given = (u16*)(list + AT);
        u16* const shared = given + num_pairs * groups * STEP;
        return {groups, num_pairs, given, shared,
                (float*)(shared + num_pairs / TOP_K * groups * STEP)};
    }
    // What is there already is on its way from here on.
    __device__ void fetch(const float* from, const u16* shared_from) const
    {
        constexpr int LINES = STEP / 8;
        const int thread = (int)threadIdx.x, group = thread / LINES, line = thread % LINES;
        if (thread < num_pairs) copy_word_async(shared_address(weight + thread), from + thread);
        if (shared_from == nullptr || group >= groups) return;
#pragma unroll 1
        for (int row = 0; row < num_pairs / TOP_K; ++row)
            copy_async(shared_address(shared + (row * groups + group) * STEP + line * 8),
                       shared_from + (i64)row * WIDTH + column(group) + line * 8, true);
    }
    // Columns 4 g .. 4 g + 3 of a lane, as a unit's sums have them.
    __device__ void operator()(const Pairs& pairs, const Unit& unit, const Sums& sum) const
    {
        const int lane = lane_id();
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int pair = pairs.at(0, lane % 4 * 2 + odd);
            if (pair >= 0)
                *(uint2*)(given + (pair * groups + unit.part) * STEP + lane / 4 * 4) =
                    four_of(sum, 0, odd);
        }
    }
    // Two columns a thread, when all is there.
    __device__ void add_up(u16* out, bool with_shared) const
    {
        constexpr int TWOS = STEP / 2;
        const int group = (int)threadIdx.x / TWOS, two = (int)threadIdx.x % TWOS * 2;
        if (group >= groups) return;
#pragma unroll 1
        for (int row = 0; row < num_pairs / TOP_K; ++row) {
            u32 term[TOP_K];
#pragma unroll
            for (int k = 0; k < TOP_K; ++k)
                term[k] = *(const u32*)(given + ((row * TOP_K + k) * groups + group) * STEP + two);
            float low = 0.0f, high = 0.0f;
#pragma unroll
            for (int k = 0; k < TOP_K; ++k) {
                const float w = weight[row * TOP_K + k];
                if (w == 0.0f) continue;  // of no expert: nobody gave anything
                low += w * bf16_low(term[k]);
                high += w * bf16_high(term[k]);
            }
            if (with_shared) {
                const u32 last = *(const u32*)(shared + (row * groups + group) * STEP + two);
                low += bf16_low(last);
                high += bf16_high(last);
            }
            *(u32*)(out + (i64)row * WIDTH + column(group) + two) = bf16_pair(low, high);
        }
    }

private:
    __device__ static int column(int group) { return OwnedUnits::group(group) * STEP; }
};
