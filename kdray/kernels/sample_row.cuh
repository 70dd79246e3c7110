// Rows of logits as sample_tokens.cu reads them, four neighbours at a time, cleaned.
#pragma once

#include "keys.cuh"

constexpr int THREADS = 256, CUT_THREADS = 512;  // of a block; CUT_THREADS: of find_cuts
constexpr int NEIGHBOURS = 4;  // words of a Philox block

__device__ __forceinline__ float cleaned(float x) {
    return is_nan(x) ? -infinity() : x == infinity() ? LARGEST_FLOAT : x;
}

struct Row {
    const unsigned char* data;
    int size;
    bool aligned;  // 4 neighbours can be read at once

    __device__ __forceinline__ float at(int i) const {
#if INPUT_BF16
        return cleaned(bf16_low(__ldg((const u16*)data + i)));
#else
        return cleaned(__ldg((const float*)data + i));
#endif
    }
    // Logits first .. first + 3, cleaned; -inf beyond the row.
    __device__ __forceinline__ void load(int first, float (&x)[NEIGHBOURS]) const {
        if (aligned && first + NEIGHBOURS <= size) {
#if INPUT_BF16
            const uint2 v = __ldg((const uint2*)((const u16*)data + first));
            x[0] = bf16_low(v.x), x[1] = bf16_high(v.x);
            x[2] = bf16_low(v.y), x[3] = bf16_high(v.y);
#else
            const uint4 v = __ldg((const uint4*)((const float*)data + first));
            x[0] = float_of(v.x), x[1] = float_of(v.y), x[2] = float_of(v.z), x[3] = float_of(v.w);
#endif
#pragma unroll
            for (int i = 0; i < NEIGHBOURS; ++i) x[i] = cleaned(x[i]);
        } else {
#pragma unroll
            for (int i = 0; i < NEIGHBOURS; ++i)
                x[i] = first + i < size ? at(first + i) : -infinity();
        }
    }
};

__device__ __forceinline__ Row row_of(const void* logits, i64 stride, int size, int number) {
    constexpr int BYTES = INPUT_BF16 ? 2 : 4;
    const unsigned char* data = (const unsigned char*)logits + number * stride * BYTES;
    return {data, size, (u64)data % (BYTES * NEIGHBOURS) == 0};
}
