// RMSNorm of rows, with the residual add in front of it (Ops.rms_norm, Ops.add_rms_norm).
//
// total = x + delta, rounded to the dtype; out = total / sqrt(mean(total^2) + eps), rounded again,
// then * weight. Without delta (null) total is x, and is not written.
//
// outputs  out    [T, WIDTH]           total [T, WIDTH] (may be x itself)
// inputs   x      [T, WIDTH] at a row stride of x_stride vectors
//          delta  [T, WIDTH] or null;  weight [WIDTH];  eps [] float32
// All but eps are bfloat16 or float32 (INPUT_BF16), their rows of whole vectors of 16 bytes.
//
// Grid T blocks, one a row; thread t holds vectors t, t + THREADS, .. of it in registers, so that
// memory is read once. Static shared memory 4 bytes a warp. A row's bits depend on that row alone.
// Limits: at most 8 vectors a thread.
// Sums are float32 in a fixed order; a scale lies within 1e-6 of the exact one, relatively. Oracle:
// reference_fused.py; float32 within 2e-6 relatively, bfloat16 within two roundings.

#include "overlap.cuh"
#include "row_norm.cuh"

static_assert(ITEMS <= 8, "a row must fit the registers");

extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(uint4* out, uint4* total, const uint4* x, const uint4* delta, const uint4* weight,
         const float* eps, int x_stride)
{
    const i64 row = blockIdx.x;
    uint4 held[ITEMS], added[ITEMS], factor[ITEMS];
    // All loads before the first use, so that their trips to memory overlap; weights before the wait.
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (has(i)) factor[i] = weight[place(i)];
    const float epsilon = *eps;
    start_behind_previous();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (has(i)) held[i] = x[row * x_stride + place(i)];
    if (delta) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (has(i)) added[i] = delta[row * VECTORS + place(i)];
    }

    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (!has(i)) continue;
        if (delta) {
            held[i] = packed(unpacked(held[i]) + unpacked(added[i]));
            total[row * VECTORS + place(i)] = held[i];
        }
        squares += sum_of_squares(unpacked(held[i]));
    }
    const float scale = row_scale(squares, epsilon);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (has(i)) out[row * VECTORS + place(i)] = normalised(held[i], scale, factor[i]);
}
