// What a row's experts gave, weighted: by moe_sum or, of few rows, by the last warp at their columns.
#pragma once

#include "moe_w4a16_units.cuh"

// Eight bf16, as float.
struct Eight {
    float x[8];
};
__device__ __forceinline__ Eight eight_of(const uint4& v)
{
    return {{bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y), bf16_low(v.z),
             bf16_high(v.z), bf16_low(v.w), bf16_high(v.w)}};
}

// Eight columns of a row of out, the experts in order.
__device__ __forceinline__ void sum_of_experts(u16* out, const u16* partial, const float* weight,
                                               const u16* shared, int row, int column)
{
    uint4 given[TOP_K];
#pragma unroll
    for (int k = 0; k < TOP_K; ++k)
        given[k] = load_shared_by_blocks(
            (const uint4*)(partial + ((i64)row * TOP_K + k) * WIDTH + column));
    Eight sum{};
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {
        const Eight term = eight_of(given[k]);
        const float w = weight[row * TOP_K + k];
        if (w == 0.0f) continue;  // of no expert: partial holds anything, even NaN
#pragma unroll
        for (int i = 0; i < 8; ++i) sum.x[i] += w * term.x[i];
    }
    const i64 at = (i64)row * WIDTH + column;
    if (shared != nullptr) {
        const Eight term = eight_of(*(const uint4*)(shared + at));
#pragma unroll
        for (int i = 0; i < 8; ++i) sum.x[i] += term.x[i];
    }
    *(uint4*)(out + at) = {bf16_pair(sum.x[0], sum.x[1]), bf16_pair(sum.x[2], sum.x[3]),
                           bf16_pair(sum.x[4], sum.x[5]), bf16_pair(sum.x[6], sum.x[7])};
}

// Registers for it beside a product's.
constexpr bool FOLDS = COLUMN_TILES == 1 && TOP_K <= 8;

// The sum of all rows, 32 columns at a time, by the warp that comes last to them; the last of these
// leaves all counters at 0 for the next launch. Every warp has seen the counters of `ready` that it
// waits for before it comes here the last time.
struct Finish {
    u16* out;
    int* arrived;  // [1 + WIDTH / 32, READY_INTS]: 32 columns that are done, tiles at each; or null
    int* ready;
    const u16* partial;
    const float* weight;
    const u16* shared;
    int rows, tiles;

    __device__ bool folds() const { return FOLDS && arrived != nullptr; }

    // A warp has stored a tile's 32 columns of partial.
    __device__ void after(int part) const
    {
        if (!comes_last(arrived + (1 + part) * READY_INTS, tiles)) return;
        sum(part);
        if (!comes_last(arrived, WIDE_STEPS)) return;
        for (int i = lane_id(); i < tiles; i += WARP) ready[i * READY_INTS] = 0;
    }
    // Without a tile nobody comes: rows get what is shared.
    __device__ void without_tiles() const
    {
        const int warp = (int)(threadIdx.x / WARP * gridDim.x + blockIdx.x);
        for (int part = warp; part < WIDE_STEPS; part += WARPS * (int)gridDim.x) sum(part);
    }

private:
    __device__ void sum(int part) const
    {
        const int column = part * STEP + lane_id() % 4 * 8;
        for (int row = lane_id() / 4; row < rows; row += WARP / 4)
            sum_of_experts(out, partial, weight, shared, row, column);
    }
    // Sets the counter back for the next launch where it is so.
    __device__ static bool comes_last(int* counter, int all)
    {
        __syncwarp();
        bool last = false;
        if (lane_id() == 0) {
            last = add_acquire_release(counter, 1) == all - 1;
            if (last) *counter = 0;
        }
        return __ballot_sync(ALL_LANES, last) != 0;
    }
};
