// Few rows of x as rms_norm.cu would have left them, to the bit, where skinny_gemm.cu's copies would
// have put them: for a block that multiplies whole rows. Part of skinny_gemm_normed.cu, by whose
// sizes it is compiled.
#pragma once

#include "vectors.cuh"

// COUNT sums over a warp at once, each to the bit as warp_sum has it; lane l is left with sum
// l / (WARP / COUNT). Halves of the warp part the numbers between them, so that 4 take 6 shuffles.
template <int COUNT>
__device__ __forceinline__ float warp_sums(float (&x)[COUNT])
{
    static_assert((COUNT & (COUNT - 1)) == 0 && COUNT <= WARP, "halved until one is left");
#pragma unroll
    for (int by = WARP / 2, count = COUNT / 2; by > 0; by /= 2, count /= 2) {
        const bool upper = lane_id() & by;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const float kept = upper ? x[i + count] : x[i], given = upper ? x[i] : x[i + count];
            x[i] = kept + __shfl_xor_sync(ALL_LANES, given, by);
        }
        if (count == 0) x[0] += __shfl_xor_sync(ALL_LANES, x[0], by);
    }
    return x[0];
}

// A row's squares are added up as by rms_norm.cu's block: a vector a thread, a warp's in a tree, then
// warps in their order. A warp here stands for the same one of it in every row that it takes, and
// keeps its vectors in registers from the only fetch there is.
struct NormedRows {
    static constexpr int VECTORS_A_ROW = WIDTH / VECTOR;
    static constexpr int PARTS = (VECTORS_A_ROW + WARP - 1) / WARP;  // warps a row
    static constexpr int ROOM = THREADS / WARP / PARTS;
    static constexpr int TEAMS = ROOM >= 8 ? 8 : ROOM >= 4 ? 4 : ROOM >= 2 ? 2 : 1;
    static constexpr int UNITS = TOKENS / TEAMS;  // rows that a warp takes
    static_assert(WIDTH % STEP == 0 && WIDTH <= 4096, "a vector a thread of rms_norm.cu's");
    static_assert(TOKEN_TILES == 1 && SPLIT == 1, "a block has whole rows");
    static_assert((WIDTH / STEP + SLICES - 1) / SLICES <= CHUNK, "and all of them at once");
    static_assert(ROOM >= 1, "warps for a row");

    const u16* x;  // the thread's vector of its first row
    int x_row;     // numbers from one to the next
    int tokens;
    u32 team, part;  // the warp's
    uint4 factor;
    float epsilon;

    // `x`: the first row. Reads what the grid in front does not write.
    __device__ NormedRows(const u16* x, int x_row, int tokens, const uint4* weight,
                          const float* eps)
        : x_row(x_row), tokens(tokens), team(threadIdx.x / WARP / PARTS),
          part(threadIdx.x / WARP % PARTS)
    {
        this->x = x + team * (i64)x_row + vector() * VECTOR;
        if (is_in_row()) factor = weight[vector()];
        epsilon = *eps;
    }
    // All threads: rows to `to`, by way of sums[PARTS * TOKENS] in shared memory. At the end they are
    // there for all.
    __device__ void bring(SharedAddress to, float* sums) const
    {
        uint4 held[UNITS];
        float squares[UNITS];
#pragma unroll
        for (int i = 0; i < UNITS; ++i)
            held[i] = has(i) ? *(const uint4*)(x + i * TEAMS * (i64)x_row) : uint4{0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < UNITS; ++i)  // rows that no warp has are passed over
            squares[i] = i * TEAMS < tokens ? sum_of_squares(unpacked(held[i])) : 0.0f;
        const float sum = warp_sums(squares);
        constexpr int APIECE = WARP / UNITS;  // lanes that are left with a row's
        if (team < TEAMS && lane_id() % APIECE == 0)
            sums[part * TOKENS + row(lane_id() / APIECE)] = sum;
        __syncthreads();
        const float scale = scale_of(sums + lane_id() % TOKENS);  // a lane a row: few instructions
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const float own = __shfl_sync(ALL_LANES, scale, row(i) % TOKENS);
            if (has(i)) store_shared_vector(to + offset(row(i)), normalised(held[i], own, factor));
        }
        __syncthreads();
    }
    // The lane's share of the first step of the warp's run.
    __device__ int share(u32 run) const
    {
        return (run * tokens + min(lane_id() / 4, tokens - 1)) * Rows::ROW_BYTES + lane_id() % 4 * 16;
    }

private:
    __device__ int row(int i) const { return team + i * TEAMS; }
    __device__ u32 vector() const { return part * WARP + lane_id(); }
    __device__ bool is_in_row() const { return team < TEAMS && vector() < VECTORS_A_ROW; }
    __device__ bool has(int i) const { return is_in_row() && row(i) < tokens; }
    __device__ float scale_of(const float* sums) const
    {
        float sum = sums[0];
#pragma unroll
        for (int p = 1; p < PARTS; ++p) sum += sums[p * TOKENS];
        return rms_scale(sum, WIDTH, epsilon);
    }
    // Of the thread's vector in a row.
    __device__ u32 offset(int row) const
    {
        constexpr u32 STEPS = WIDTH / STEP;
        const u32 step = vector() / 4;
        const u32 run = ((step + 1) * SLICES - 1) / STEPS;  // the last that starts at it or before
        return (run * tokens + row) * Rows::ROW_BYTES + (step - run * STEPS / SLICES) * 64 +
               vector() % 4 * 16;
    }
};
