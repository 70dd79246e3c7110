// Few rows of x as rms_norm.cu would have left them, to the bit, where skinny_gemm.cu's copies would
// have put them: for a block that multiplies whole rows. Part of skinny_gemm_normed.cu, by whose sizes
// it is compiled.
#pragma once

#include "vectors.cuh"

// A row's squares are added up as by rms_norm.cu's block: a vector a thread, a warp's in a tree, then
// warps in their order. A unit is such a warp's part of a row; the block's warps share the units of
// all rows, and keep their vectors in registers from the only fetch there is.
struct NormedRows {
    static constexpr int VECTORS_A_ROW = WIDTH / VECTOR;
    static constexpr int PARTS = (VECTORS_A_ROW + WARP - 1) / WARP;
    static constexpr int WARPS = THREADS / WARP;
    static constexpr int UNITS = (TOKENS * PARTS + WARPS - 1) / WARPS;  // a warp, at most
    static_assert(WIDTH % STEP == 0 && WIDTH <= 3072, "a vector a thread of rms_norm.cu's");
    static_assert(TOKEN_TILES == 1 && SPLIT == 1, "a block has whole rows");
    static_assert((WIDTH / STEP + SLICES - 1) / SLICES <= CHUNK, "and all of them at once");
    static_assert(UNITS <= 8, "its vectors and their weights must fit the registers");

    const u16* x;
    int x_row;  // numbers from one to the next
    u32 tokens;
    u32 warp, lane;
    SharedAddress base;
    float* part;  // [PARTS][TOKENS], of shared memory
    uint4 factor[UNITS];
    float epsilon;

    __device__ u32 row(int i) const { return (warp + i * WARPS) / PARTS; }
    __device__ u32 vector(int i) const { return (warp + i * WARPS) % PARTS * WARP + lane; }
    __device__ bool has(int i) const { return row(i) < tokens && vector(i) < VECTORS_A_ROW; }

    // What the grid in front does not write.
    __device__ void fetch_weights(const uint4* weight, const float* eps)
    {
#pragma unroll
        for (int i = 0; i < UNITS; ++i)
            if (has(i)) factor[i] = weight[vector(i)];
        epsilon = *eps;
    }
    // All threads; what they left is there for all of them at the end.
    __device__ void bring() const
    {
        uint4 held[UNITS];
#pragma unroll
        for (int i = 0; i < UNITS; ++i)
            if (has(i)) held[i] = *(const uint4*)(x + row(i) * (i64)x_row + vector(i) * VECTOR);
#pragma unroll
        for (int i = 0; i < UNITS; ++i)
            if (row(i) < tokens) {
                const float squares =
                    warp_sum(has(i) ? sum_of_squares(unpacked(held[i])) : 0.0f);
                if (lane == 0) part[(warp + i * WARPS) % PARTS * TOKENS + row(i)] = squares;
            }
        __syncthreads();
        const float scale = scale_of(min(lane, tokens - 1));  // a lane a row: few instructions
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const float own = __shfl_sync(ALL_LANES, scale, row(i));
            if (has(i)) store_shared_vector(place(i), normalised(held[i], own, factor[i]));
        }
        __syncthreads();
    }
    // The lane's share of a run's first step.
    __device__ SharedAddress run(u32 run) const
    {
        return at(run, min(lane / 4, tokens - 1)) + lane % 4 * 16;
    }

private:
    __device__ float scale_of(u32 row) const
    {
        float sum = part[row];
#pragma unroll
        for (int p = 1; p < PARTS; ++p) sum += part[p * TOKENS + row];
        return rms_scale(sum, WIDTH, epsilon);
    }
    __device__ SharedAddress at(u32 run, u32 row) const
    {
        return base + (run * tokens + row) * Rows::ROW_BYTES;
    }
    __device__ SharedAddress place(int i) const
    {
        constexpr u32 STEPS = WIDTH / STEP;
        const u32 step = vector(i) / 4;
        const u32 run = ((step + 1) * SLICES - 1) / STEPS;  // the last that starts at it or before
        return at(run, row(i)) + (step - run * STEPS / SLICES) * 64 + vector(i) % 4 * 16;
    }
};
