// SwiGLU of a joined gate|up product (Ops.swiglu): out = silu(gate) * up.
//
// output  out      [rows, I]
// input   gate_up  [rows, 2 I], gate then up; bfloat16 or float32 (INPUT_BF16) in whole vectors of
//                  16 bytes, contiguous
// vectors          of I numbers
//
// Grid (rows, slices of a row), any block of one dimension: a thread a vector. No shared memory.
// Limits: none but the grid's 65,535 slices.
// silu(x) = x / (1 + e^-x) in float32, rounded to the dtype before the product, which is rounded
// again. Oracle: reference_fused.py, float32 within 1e-6 relatively (the exponential's last bits),
// bfloat16 within two roundings.

#ifndef INPUT_BF16
#define INPUT_BF16 1
#endif

#include "overlap.cuh"
#include "vectors.cuh"

__device__ __forceinline__ Numbers silu(const Numbers& x)
{
    Numbers out;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) out.x[e] = divide(x.x[e], 1.0f + expf(-x.x[e]));
    return out;
}

extern "C" __global__ void __launch_bounds__(256)
swiglu(uint4* out, const uint4* gate_up, int vectors)
{
    start_behind_previous();
    const i64 row = blockIdx.x;
    const int at = blockIdx.y * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    const uint4 gate = gate_up[row * 2 * vectors + at];
    const uint4 up = gate_up[row * 2 * vectors + vectors + at];
    out[row * vectors + at] = packed(rounded(silu(unpacked(gate))) * unpacked(up));
}
