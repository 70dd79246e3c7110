// Rows of bfloat16 or float32 in vectors of 16 bytes, computed on in float32. INPUT_BF16 comes from
// the compiler: it says which of the two.
#pragma once

#include "common.cuh"

constexpr int VECTOR = INPUT_BF16 ? 8 : 4;  // numbers in 16 bytes

struct Numbers {
    float x[VECTOR];
};

__device__ __forceinline__ Numbers unpacked(const uint4& vector)
{
    const u32 word[4] = {vector.x, vector.y, vector.z, vector.w};
    Numbers out;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
#if INPUT_BF16
        out.x[e] = e % 2 ? bf16_high(word[e / 2]) : bf16_low(word[e / 2]);
#else
        out.x[e] = float_of(word[e]);
#endif
    }
    return out;
}

// Rounded to the dtype of rows.
__device__ __forceinline__ uint4 packed(const Numbers& in)
{
    u32 word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#if INPUT_BF16
        word[w] = bf16_pair(in.x[2 * w], in.x[2 * w + 1]);
#else
        word[w] = bits_of(in.x[w]);
#endif
    }
    return {word[0], word[1], word[2], word[3]};
}

__device__ __forceinline__ Numbers rounded(const Numbers& in) { return unpacked(packed(in)); }

__device__ __forceinline__ Numbers operator+(const Numbers& a, const Numbers& b)
{
    Numbers out;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) out.x[e] = a.x[e] + b.x[e];
    return out;
}
__device__ __forceinline__ Numbers operator*(const Numbers& a, const Numbers& b)
{
    Numbers out;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) out.x[e] = a.x[e] * b.x[e];
    return out;
}
__device__ __forceinline__ Numbers operator*(const Numbers& a, float b)
{
    Numbers out;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) out.x[e] = a.x[e] * b;
    return out;
}
__device__ __forceinline__ float sum_of_squares(const Numbers& a)
{
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) sum += a.x[e] * a.x[e];
    return sum;
}

// The sum over a warp, the same bits in every lane and in every launch.
__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int by = WARP / 2; by > 0; by /= 2) x += __shfl_xor_sync(ALL_LANES, x, by);
    return x;
}

// 1 / sqrt(mean of squares + eps), correctly rounded but for the mean.
__device__ __forceinline__ float rms_scale(float squares, int width, float eps)
{
    return divide(1.0f, sqrtf(eps + squares * (1.0f / width)));
}
// x * scale, rounded to the rows' dtype, then * weight: as the family was trained.
__device__ __forceinline__ uint4 normalised(const uint4& x, float scale, const uint4& weight)
{
    return packed(rounded(unpacked(x) * scale) * unpacked(weight));
}
