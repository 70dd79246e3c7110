// Running sums over a block's threads.
#pragma once

#include "common.cuh"

// Up to and with the own thread of the block, whose warps are as many as of_warp's entries. T is two
// running sums in one number, or one.
template <class T>
__device__ __forceinline__ T running_sum(T own, T* of_warp)
{
    const int lane = lane_id(), warp = threadIdx.x / WARP;
    T sum = own;
#pragma unroll
    for (int by = 1; by < WARP; by *= 2) {
        const T lower = __shfl_up_sync(ALL_LANES, sum, by);
        if (lane >= by) sum += lower;
    }
    if (lane == WARP - 1) of_warp[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += of_warp[w];
    return sum;
}
