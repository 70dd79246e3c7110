// How skinny_gemm.cu's operands come in: weights, through rings that each lane fills and reads
// by itself; and words that one block leaves for another of the same launch. Rows of x:
// skinny_gemm_rows.cuh.
#pragma once

#include "mma.cuh"
#include "relaxed.cuh"

// A word of the workspace that holds nothing. No sum has these bits: what is no number leaves an
// addition as another NaN, and publish() lets none pass.
constexpr u32 EMPTY = 0xffffffffu;

#ifdef __CUDACC__

__device__ __forceinline__ void store_shared_vector(SharedAddress to, const uint4& v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

#else

inline void store_shared_vector(SharedAddress to, const uint4& v)
{
    *(uint4*)simt::shared_pointer(to, 16) = v;
}

#endif

// One warp's weights: steps of 32 inputs by TILES tiles of 16 rows, with room for DEPTH steps. A
// lane copies what its own fragments need and nobody else reads it, so there is no barrier. A step
// takes the place of the one DEPTH before it, when that has been multiplied.
template <int TILES, int DEPTH>
struct WeightRing {
    static constexpr int PARTS = 2 * TILES;  // rows g and g + 8 of each tile
    static constexpr int STEP_BYTES = PARTS * WARP * 16;
    static constexpr int BYTES = DEPTH * STEP_BYTES;

    const unsigned char* row[PARTS];  // where the lane's share of step 0 lies
    SharedAddress base;               // of the lane's share of slot 0
    int steps;

    __device__ void start(int step) const
    {
        if (step < steps) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
                copy_line_async(at(step) + p * WARP * 16, row[p] + (i64)step * 64);
        }
        end_group();
    }
    __device__ void fill() const
    {
#pragma unroll 1
        for (int step = 0; step < DEPTH; ++step) start(step);
    }
    // Until a step has landed, behind which AHEAD have been started.
    template <int AHEAD>
    __device__ void wait() const
    {
        wait_for_groups<AHEAD>();
    }
    __device__ uint4 part(int step, int p) const
    {
        return shared_vector(at(step) + p * WARP * 16);
    }

private:
    __device__ SharedAddress at(int step) const { return base + step % DEPTH * STEP_BYTES; }
};

__device__ __forceinline__ u32 publishable(float x)
{
    return bits_of(x) == EMPTY ? 0x7fffffffu : bits_of(x);
}
__device__ __forceinline__ bool is_full(const uint4& v)
{
    return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY;
}
// A word that another block publishes, or EMPTY.
__device__ __forceinline__ uint4 look_at(const uint4* from)
{
    const uint4 v = load_relaxed(from);
#ifndef __CUDACC__
    if (v.x == EMPTY) simt::wait_for_other_blocks();
#endif
    return v;
}
__device__ __forceinline__ void publish(uint4* to, const float4& v)
{
    store_relaxed(to, {publishable(v.x), publishable(v.y), publishable(v.z), publishable(v.w)});
}

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b)
{
    return {plus(a.x, b.x), plus(a.y, b.y), plus(a.z, b.z), plus(a.w, b.w)};
}
// ((v0 + v1) + (v2 + v3)) + ..: a run of a power of two of vectors, as a balanced tree, so that its
// halves may have been summed elsewhere.
template <int COUNT>
__device__ __forceinline__ float4 tree_sum(const float4* v, int stride)
{
    if constexpr (COUNT == 1)
        return *v;
    else
        return tree_sum<COUNT / 2>(v, stride) + tree_sum<COUNT / 2>(v + COUNT / 2 * stride, stride);
}
