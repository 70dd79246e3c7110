// Conversions between float32, float16 and e4m3 in pairs, each to nearest with halves to even, and a
// twin that runs in the tests' CPU shim. Rows of the latent cache: latent_rows.py.
#pragma once

#include "common.cuh"

constexpr float LARGEST_E4M3 = 448.0f;

// Bytes of a cache row in fp8: latents of a byte, keys of two, a scale; an odd number of chunks.
__host__ __device__ constexpr int fp8_row_bytes(int latent, int rope) {
    return 16 * ((latent + 2 * rope + 4 + 15) / 16 | 1);
}

#ifdef __CUDACC__

// Two floats in 16 bits, the first in the low byte; what is too large becomes the largest.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
// The two numbers in the low 16 bits, exactly.
__device__ __forceinline__ u32 half_pair_of_e4m3(u32 pair) {
    u32 halves;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }"
        : "=r"(halves)
        : "r"(pair));
    return halves;
}
// The two in the high 16 bits.
__device__ __forceinline__ u32 half_pair_of_e4m3_high(u32 pair) {
    u32 halves;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }"
        : "=r"(halves)
        : "r"(pair));
    return halves;
}
// Two floats in float16, the first in the low half; what is too large becomes the largest, 65504.
__device__ __forceinline__ u32 half_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// Bytes 0, 2 in the low half, 1, 3 in the high one.
__device__ __forceinline__ u32 even_bytes_low(u32 x) { return __byte_perm(x, 0, 0x3120); }

#else

inline u32 e4m3_pair(float low, float high) {
    return simt::round_to_e4m3(low) | simt::round_to_e4m3(high) << 8;
}
inline u32 half_pair(float low, float high) {
    return simt::round_to_half(low) | simt::round_to_half(high) << 16;
}
inline u32 half_pair_of_e4m3(u32 pair) {
    return half_pair(simt::from_e4m3(pair & 0xff), simt::from_e4m3(pair >> 8 & 0xff));
}
inline u32 half_pair_of_e4m3_high(u32 pair) { return half_pair_of_e4m3(pair >> 16); }
inline u32 even_bytes_low(u32 x) {
    return (x & 0xff0000ffu) | (x >> 8 & 0xff00u) | (x & 0xff00u) << 8;
}

#endif
