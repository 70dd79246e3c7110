// How moe_w4a16's work is dealt: to blocks in the first half, to warps in the second, evenly over both.
#pragma once

#include "moe_w4a16_tiles.cuh"

#include "moe_w4a16_stream.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * WARP;
constexpr int SLICE = 16;  // columns of a unit of the first half
constexpr int SLICES = INNER / SLICE;
constexpr int WIDE_STEPS = WIDTH / STEP, INNER_STEPS = INNER / STEP;
constexpr int SHARE = (WIDE_STEPS + WARPS - 1) / WARPS;  // steps of a warp in the first half
constexpr int SHARES = (WIDE_STEPS + SHARE - 1) / SHARE;
constexpr int ADDERS = 4;  // warps that add up a column tile
constexpr int READY_INTS = 32;  // a tile's counter has a line to itself: many look at it at once
// Units of the second half that take as long as one of the first.
constexpr int EQUALS = CATCH_UP && COLUMN_TILES <= 2 ? (SHARE + INNER_STEPS / 2) / INNER_STEPS : 0;
// Every slot is full: no step of one need be asked for.
constexpr bool WHOLE_SLOTS =
    WIDE_STEPS % SHARE == 0 && SHARE % SLOT_STEPS == 0 && INNER_STEPS % SLOT_STEPS == 0;
static_assert(WIDTH % STEP == 0 && INNER % STEP == 0, "whole groups");

#ifdef __CUDACC__

// Whether so many have arrived: what they wrote before is seen by this thread, and by those it meets.
__device__ __forceinline__ bool have_arrived(const int* counter, int number)
{
    int seen;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    return seen >= number;
}
__device__ __forceinline__ void arrive(int* counter)
{
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
// How many of the block have been here before, whose writes are then seen.
__device__ __forceinline__ u32 count_in_block(SharedAddress counter)
{
    u32 before;
    asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(counter)
                 : "memory");
    return before;
}

#else

inline bool have_arrived(const int* counter, int number)
{
    const bool there = *(const volatile int*)counter >= number;
    if (!there) simt::wait_for_other_blocks();
    return there;
}
inline void arrive(int* counter) { ++*counter; }
inline u32 count_in_block(SharedAddress counter)
{
    return (*(u32*)simt::shared_pointer(counter, 4))++;
}

#endif

// A tile's number, and the number of 16 or 32 columns.
struct Unit {
    int tile, part;
};

// [max_tiles, READY_INTS]: arrivals at a tile's `inner`, in the first of each.
__device__ __forceinline__ int* counter_of(int* ready, const Unit& unit)
{
    return ready + unit.tile * READY_INTS;
}

// The units of one warp, first half, then second; all warps of a block have the same of the first.
// Blocks with one of these less than others begin the second half with EQUALS units a warp.
struct Units {
    Tiles tiles;
    const unsigned char* gate_up;
    const unsigned char* down;
    int warp, num_first, num_early, num_all;
    int ahead;  // blocks with a unit more: the first ones, 0 for none

    __device__ void count()
    {
        const int blocks = (int)gridDim.x, block = (int)blockIdx.x;
        const int first = tiles.number * SLICES, second = tiles.number * WIDE_STEPS;
        warp = COLUMN_TILES > 2 ? (int)threadIdx.x / WARP : same_in_warp((int)threadIdx.x / WARP);
        num_first = shares_of(first, blocks, block);
        ahead = EQUALS > 0 && first > blocks ? first % blocks : 0;
        num_early = 0;
        if (ahead > 0 && block >= ahead)
            num_early = min(EQUALS, shares_of(second, (blocks - ahead) * WARPS, early_place()));
        num_all = num_first + num_early +
                  shares_of(second - early_units(), blocks * WARPS, warp * blocks + block);
    }
    __device__ static int shares_of(int units, int sharers, int own)
    {
        return own < units ? (units - own - 1) / sharers + 1 : 0;
    }
    __device__ int early_units() const
    {
        return ahead > 0 ? EQUALS * WARPS * ((int)gridDim.x - ahead) : 0;
    }
    __device__ int early_place() const
    {
        return warp * ((int)gridDim.x - ahead) + (int)blockIdx.x - ahead;
    }
    __device__ int first_unit(int i) const { return (int)(blockIdx.x + i * gridDim.x); }
    // Neighbouring blocks take neighbouring columns, so that few units still go to all of them.
    __device__ int second_unit(int i) const
    {
        const int early = i - num_first, late = early - num_early;
        if (late < 0) return early * WARPS * ((int)gridDim.x - ahead) + early_place();
        return early_units() + (int)((late * WARPS + warp) * gridDim.x + blockIdx.x);
    }
    __device__ int share_begin() const { return warp * SHARE; }
    __device__ int share() const { return max(0, min(SHARE, WIDE_STEPS - share_begin())); }

    __device__ bool is_first(int i) const { return i < num_first; }
    __device__ Unit at(int i) const
    {
        const u32 unit = is_first(i) ? first_unit(i) : second_unit(i);
        const u32 tile = is_first(i) ? unit / SLICES : unit / WIDE_STEPS;
        return {(int)tile, (int)(unit - tile * (is_first(i) ? SLICES : WIDE_STEPS))};
    }
    __device__ Pairs pairs(const Unit& unit) const { return tiles.pairs(tiles.at(unit.tile)); }
    __device__ int steps(int i) const { return is_first(i) ? share() : INNER_STEPS; }

    // The warp's weights of its unit i.
    __device__ const unsigned char* weights(int i) const
    {
        const Unit unit = at(i);
        const i64 expert = tiles.at(unit.tile).expert;
        if (is_first(i))
            return gate_up +
                   ((expert * SLICES + unit.part) * WIDE_STEPS + share_begin()) * STEP_BYTES;
        return down + (expert * WIDE_STEPS + unit.part) * INNER_STEPS * STEP_BYTES;
    }
};

// All of a warp's weights one after another; the ring runs ahead of what is multiplied.
template <class Units>
struct Stream {
    const Units& units;
    Ring ring;
    int unit, left;  // the next unit to bring; steps left of the one before
    const unsigned char* from;

    // A slot's steps, if there are any more, to where the oldest were.
    __device__ void bring_next()
    {
        if (left == 0 && unit < units.num_all) {
            from = units.weights(unit) + Ring::place();
            left = units.steps(unit++);
        }
        if (WHOLE_SLOTS) {
            ring.bring(from, left > 0 ? SLOT_STEPS : 0);
            left = max(0, left - SLOT_STEPS);
        } else {
            const int steps = min(left, SLOT_STEPS);
            ring.bring(from, steps);
            left -= steps;
        }
        from += SLOT_BYTES;
    }
    __device__ void fill()
    {
        unit = units.share() > 0 ? 0 : units.num_first;
#pragma unroll 1
        for (int i = 0; i < SLOTS; ++i) bring_next();
    }
};

// Which of a warp's units of the second half find their tile's `inner` complete: it looks for 32 of
// them at once.
struct Readiness {
    int* ready;
    const u16* inner;
    int from;
    u32 known;

    __device__ bool knows(const Units&, int i) const
    {
        return (u32)(i - from) < WARP && (known >> (i - from) & 1);
    }
    __device__ const u16* rows() const { return inner; }
    __device__ static int row(const Pairs& pairs, int j) { return pairs.of[j]; }
    __device__ void wait_for(const Units& units, int i)
    {
        while (!knows(units, i)) {
            const int unit = i + lane_id();  // the same each time: found once, but in wide tiles
            const int* const own = unit < units.num_all ? counter_of(ready, units.at(unit)) : nullptr;
            known = __ballot_sync(ALL_LANES, own != nullptr && have_arrived(own, SLICES));
            from = i;
        }
        __syncwarp();
    }
};

// Where a warp's activations lie, a slot after the other, one slot ahead of what is multiplied.
template <class Units, class Readiness>
struct Activations {
    const Units& units;
    Readiness& ready;
    const u16* x;
    int unit;
    int left;  // its steps from this slot on; 0: they are not to be read yet
    const u16* rows;
    int at[COLUMN_TILES];  // where in them are the lane's eight numbers of this slot's first step

    // A unit's first slot, not to be read yet.
    __device__ void prepare(int i)
    {
        unit = i;
        left = 0;
        if (i == units.num_all) return;
        const bool first = units.is_first(i);
        rows = first ? x : ready.rows();
        const Pairs pairs = units.pairs(units.at(i));
        const int begin = lane_id() % 4 * 8 + (first ? units.share_begin() * STEP : 0);
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            at[j] = begin + (first ? pairs.of[j] / TOP_K * WIDTH
                                   : Readiness::row(pairs, j) * INNER);
        }
    }
    // On to the slot behind. What is not known to be there must be waited for: not here, where this
    // block's own part of it may still be under way.
    __device__ void turn()
    {
        left -= SLOT_STEPS;
        if (left > 0) {
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j) at[j] += SLOT_STEPS * STEP;
            return;
        }
        prepare(unit + 1);
        if (unit < units.num_all && (units.is_first(unit) || ready.knows(units, unit)))
            left = units.steps(unit);
    }
    // The unit's first slot is to be read now.
    __device__ void admit()
    {
        if (!units.is_first(unit)) ready.wait_for(units, unit);
        left = units.steps(unit);
    }
};
