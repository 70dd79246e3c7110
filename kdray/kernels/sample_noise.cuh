// The Gumbel noise of sample_tokens.cu: Philox words, and what they stand for, exactly or nearly.
#pragma once

#include "common.cuh"

constexpr float MOST_NOISE = 22.9f;          // -log(-log(1 - 2^-33)) is 22.874
constexpr float NOISE_SLACK = 0.0009765625f;  // of an estimate of t + noise; seen: a tenth of it

struct Words {
    u32 word[NEIGHBOURS];
};

// Philox4x32-10 at counter (group, position, 0, 0).
__device__ __forceinline__ Words philox(u32 group, u32 position, u64 seed) {
    u32 c0 = group, c1 = position, c2 = 0, c3 = 0;
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 even = (u64)0xD2511F53u * c0, odd = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(odd >> 32) ^ c1 ^ k0, c2 = (u32)(even >> 32) ^ c3 ^ k1;
        c1 = (u32)odd, c3 = (u32)even;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

__device__ __noinline__ float exact_noise(u32 word) {
    const double uniform = ((double)word + 0.5) * 2.3283064365386963e-10;  // 2^-32
    return (float)-log(-log(uniform));
}

// exact_noise within half of NOISE_SLACK. Near 1 the logarithm is taken of the distance from 1,
// which float32 still knows.
__device__ __forceinline__ float estimated_noise(u32 word) {
    constexpr float LN_2 = 0.693147181f, SCALE = 2.3283064365386963e-10f;
    const float rest = ((float)~word + 0.5f) * SCALE;
    const float near_one = fmaf(0.5f * rest, rest, rest);
    const float wide = -LN_2 * log2_fast(((float)word + 0.5f) * SCALE);
    return -LN_2 * log2_fast(~word < 1u << 24 ? near_one : wide);
}
