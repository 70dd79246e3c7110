// A row of logits as topk_logprob.cu reads it: units of 1024 in a warp's registers, and candidates
// as integer keys. K and INPUT_BF16 come from the compiler.
#pragma once

#include "keys.cuh"

static_assert(K >= 1 && K <= 64, "K must be 1 to 64");

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int UNIT = 1024;  // logits of one warp
constexpr int LANE_SIZE = UNIT / WARP;
constexpr int SEGMENT = UNIT * WARPS;
constexpr int MAX_UNITS = 256;
constexpr int VECTOR = INPUT_BF16 ? 8 : 4;  // logits in 16 bytes
constexpr int VECTORS = LANE_SIZE / VECTOR;
constexpr int WORDS = VECTORS * 4;
constexpr int PARTS = 4;  // a lane's maxima are kept by parts of 8 logits
constexpr int PART = LANE_SIZE / PARTS;
constexpr int PART_WORDS = WORDS / PARTS;

// The float just below: x > below(y) is x >= y. Zeros count as one.
__device__ __forceinline__ float below(float y) {
    if (y == -infinity()) return y;
    return from_ordered(ordered(y == 0.0f ? -0.0f : y) - 1);
}

// NaN becomes -inf, +inf the largest float32. In bf16 +inf stays: nothing else is as large.
__device__ __forceinline__ float cleaned(float x) {
    if (is_nan(x)) return -infinity();
    return !INPUT_BF16 && x == infinity() ? LARGEST_FLOAT : x;
}

__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP; }

// Where a lane's logit e stands in its unit: neighbours share 16 bytes, lanes share a cache line.
__device__ __forceinline__ int place(int e) {
    return e / VECTOR * WARP * VECTOR + threadIdx.x % WARP * VECTOR + e % VECTOR;
}

// What a lane holds of a unit, in registers: the stream never looks at memory twice.
struct Slice {
    u32 word[WORDS];

    __device__ __forceinline__ float value(int e) const {
#if INPUT_BF16
        return e % 2 ? bf16_high(word[e / 2]) : bf16_low(word[e / 2]);
#else
        return float_of(word[e]);
#endif
    }
    // The largest logit of a part, or NaN where one is.
    __device__ __forceinline__ float part_max(int part) const {
        u32 most = word[part * PART_WORDS];
#pragma unroll
        for (int w = 1; w < PART_WORDS; ++w) {
            const u32 next = word[part * PART_WORDS + w];
#if INPUT_BF16
            most = bf16_pair_max_or_nan(most, next);
#else
            most = bits_of(max_or_nan(float_of(most), float_of(next)));
#endif
        }
#if INPUT_BF16
        return max_or_nan(bf16_low(most), bf16_high(most));
#else
        return float_of(most);
#endif
    }
    // How many exceed x, a value that the input's type can have.
    __device__ __forceinline__ u32 count_above(float x) const {
#if INPUT_BF16
        const u32 pair = bits_of(x) | bits_of(x) >> 16;
        u32 counts = 0;  // two, as bf16: at most 16 each
#pragma unroll
        for (int w = 0; w < WORDS; ++w)
            counts = bf16_pair_sum(counts, bf16_pair_above(word[w], pair));
        return (u32)(bf16_low(counts) + bf16_high(counts));
#else
        u32 count = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) count += float_of(word[w]) > x;
        return count;
#endif
    }
    __device__ __forceinline__ void clean() {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
#if INPUT_BF16
            if (is_nan(bf16_low(word[w]))) word[w] = (word[w] & 0xffff0000u) | 0xff80u;
            if (is_nan(bf16_high(word[w]))) word[w] = (word[w] & 0xffffu) | 0xff800000u;
#else
            word[w] = bits_of(cleaned(float_of(word[w])));
#endif
        }
    }
};

// A lane's largest logits: of each part, and of all.
struct Maxima {
    float part[PARTS];
    float most;

    __device__ __forceinline__ void take(const Slice& slice) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) part[i] = slice.part_max(i);
        most = max_or_nan(max_or_nan(part[0], part[1]), max_or_nan(part[2], part[3]));
    }
};

// One row of logits; numbers count from its start.
struct Row {
    const unsigned char* data;
    int size;
    bool aligned;  // its vectors can be read as such

    __device__ __forceinline__ u32 bits(int i) const {
#if INPUT_BF16
        return __ldg((const u16*)data + i);
#else
        return __ldg((const u32*)data + i);
#endif
    }
    __device__ __forceinline__ float raw(int i) const {
#if INPUT_BF16
        return bf16_low(bits(i));
#else
        return float_of(bits(i));
#endif
    }
    // As a cleaned slice has it; beyond the row -inf.
    __device__ __forceinline__ float value(int i) const {
        return i < size ? cleaned(raw(i)) : -infinity();
    }
    // The unit that starts at `first`; what lies beyond the row is -inf.
    __device__ __forceinline__ Slice load(int first) const {
        Slice slice;
        if (aligned && first + UNIT <= size) {
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) {
                const i64 number = first + place(j * VECTOR);
                const uint4 v = __ldg((const uint4*)(data + number * (16 / VECTOR)));
                slice.word[4 * j] = v.x, slice.word[4 * j + 1] = v.y;
                slice.word[4 * j + 2] = v.z, slice.word[4 * j + 3] = v.w;
            }
            return slice;
        }
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
#if INPUT_BF16
            const int low = first + place(2 * w);
            slice.word[w] = (low < size ? bits(low) : 0xff80u) |
                            (low + 1 < size ? bits(low + 1) : 0xff80u) << 16;
#else
            const int i = first + place(w);
            slice.word[w] = i < size ? bits(i) : 0xff800000u;
#endif
        }
        return slice;
    }
};
