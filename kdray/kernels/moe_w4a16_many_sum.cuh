// What a row's experts gave, weighted: by moe_sum_many, or slice by slice by the blocks of the down
// product, which then find it in L2.
#pragma once

#include "moe_w4a16_many_units.cuh"

// Eight bf16 times w, onto sums.
__device__ __forceinline__ void add_eight(float (&sum)[8], const uint4& v, float w)
{
    const float x[8] = {bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y),
                        bf16_low(v.z), bf16_high(v.z), bf16_low(v.w), bf16_high(v.w)};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += w * x[i];
}

// All that a sum is made of, and where it goes.
struct Terms {
    u16* out;
    const u16* partial;
    const int* place;
    const float* weight;
    const u16* shared;

    // Eight columns of a row, the experts in order.
    __device__ void add_up(int row, int column) const
    {
        float w[TOP_K];
        uint4 given[TOP_K];
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) {
            w[k] = weight[row * TOP_K + k];
            given[k] = {0, 0, 0, 0};
            if (w[k] == 0.0f) continue;  // of no expert: it has no place
            const i64 at = (i64)place[row * TOP_K + k] * WIDTH + column;
            given[k] = load_shared_by_blocks((const uint4*)(partial + at));
        }
        float sum[8] = {};
#pragma unroll
        for (int k = 0; k < TOP_K; ++k)
            if (w[k] != 0.0f) add_eight(sum, given[k], w[k]);
        const i64 at = (i64)row * WIDTH + column;
        add_eight(sum, *(const uint4*)(shared + at), 1.0f);
        *(uint4*)(out + at) = {bf16_pair(sum[0], sum[1]), bf16_pair(sum[2], sum[3]),
                               bf16_pair(sum[4], sum[5]), bf16_pair(sum[6], sum[7])};
    }
};

#ifdef __CUDACC__

__device__ __forceinline__ void arrive(int* counter)
{
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

#else

inline void arrive(int* counter) { ++*counter; }

#endif

// The down product's units go slice by slice, so a slice of all pairs is complete long before the
// last; blocks add it up LAG slices later, when nobody has to wait and L2 still has it. `arrived` counts
// a slice's units, 0 before the launch, each in a line of memory.
constexpr int LINE = 32;

struct FoldedSums {
    static constexpr int LAG = 2;
    using P = Product<false>;
    const Terms& terms;
    int* arrived;
    int rows, tiles;

    // The block's first unit is of slice `first`, or none is: SLICES.
    __device__ void before_units(int first) { add_up(0, first == P::SLICES ? first : first - LAG); }
    // A unit of `slice` is stored; the next one is of slice `next`, or none is: SLICES.
    __device__ void after_unit(int slice, int next)
    {
        __syncthreads();
        if (threadIdx.x == 0) arrive(arrived + slice * LINE);
        add_up(max(0, slice - LAG), next == P::SLICES ? next : next - LAG);
    }

private:
    __device__ void add_up(int slice, int end)
    {
#pragma unroll 1
        for (; slice < end; ++slice) {
            wait_for_blocks(arrived + slice * LINE, tiles);
            __syncwarp();
            const int column = slice * WARPS * STEP + lane_id() * 8;
            const int own = (int)(blockIdx.x * WARPS + threadIdx.x / WARP);
            if (column >= WIDTH) continue;
#pragma unroll 1
            for (int row = own; row < rows; row += (int)gridDim.x * WARPS)
                terms.add_up(row, column);
        }
    }
};

struct NoSums {
    __device__ void before_units(int) {}
    __device__ void after_unit(int, int) {}
};
