// RMSNorm of a row by one block (rms_norm.cu, all_reduce_norm.cu): thread t holds vectors t,
// t + THREADS, .. of WIDTH numbers. Squares are summed in one order, so that the same row has the
// same norm whichever kernel makes it. WIDTH, THREADS and INPUT_BF16 come from the compiler.
#pragma once

#ifndef INPUT_BF16
#define INPUT_BF16 1
#endif
#ifndef WIDTH
#define WIDTH 7168
#endif
#ifndef THREADS
#define THREADS 448
#endif

#include "vectors.cuh"

constexpr int VECTORS = WIDTH / VECTOR;
constexpr int ITEMS = (VECTORS + THREADS - 1) / THREADS;
constexpr int WARPS = THREADS / WARP;
static_assert(WIDTH % VECTOR == 0, "rows are whole vectors");
static_assert(THREADS % WARP == 0, "whole warps");

__device__ __forceinline__ int place(int item) { return item * THREADS + threadIdx.x; }
__device__ __forceinline__ bool has(int item) { return place(item) < VECTORS; }

// Once a launch.
__device__ __forceinline__ float block_sum(float x)
{
    __shared__ float part[WARPS];
    x = warp_sum(x);
    if (WARPS == 1) return x;
    if (lane_id() == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = part[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) sum += part[w];
    return sum;
}

// Of a thread's squares, the scale of the whole row.
__device__ __forceinline__ float row_scale(float squares, float epsilon)
{
    return rms_scale(block_sum(squares), WIDTH, epsilon);
}
