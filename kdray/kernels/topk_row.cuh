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
#if INPUT_BF16
typedef u16 Logit;  // its bits
#else
typedef u32 Logit;
#endif
constexpr int VECTORS = LANE_SIZE / VECTOR;
constexpr int WORDS = VECTORS * 4;

#ifdef __CUDACC__
__device__ __forceinline__ void prefetch_to_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
}
// Keeps the compiler from working a value out anew, or in parts, wherever it is used.
template <class T>
__device__ __forceinline__ T* kept(T* address) {
    asm volatile("" : "+l"(address));
    return address;
}
__device__ __forceinline__ int kept(int number) {
    asm volatile("" : "+r"(number));
    return number;
}
// 0xffff or 0 for each half of a that exceeds that of b.
__device__ __forceinline__ u32 bf16_pair_mask_above(u32 a, u32 b) {
    u32 c;
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
#else
inline void prefetch_to_l2(const void*) {}
template <class T>
inline T kept(T value) {
    return value;
}
inline u32 bf16_pair_mask_above(u32 a, u32 b) {
    const bool low = float_of(a << 16) > float_of(b << 16);
    const bool high = float_of(a & 0xffff0000u) > float_of(b & 0xffff0000u);
    return (low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u);
}
#endif

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
    // The largest logit, or NaN where one is.
    __device__ __forceinline__ float most() const {
        u32 most = word[0];
#pragma unroll
        for (int w = 1; w < WORDS; ++w) {
#if INPUT_BF16
            most = bf16_pair_max_or_nan(most, word[w]);
#else
            most = bits_of(max_or_nan(float_of(most), float_of(word[w])));
#endif
        }
#if INPUT_BF16
        return max_or_nan(bf16_low(most), bf16_high(most));
#else
        return float_of(most);
#endif
    }
    // Bit b: logit number_of(b) exceeds x, a value that the input's type can have.
    __device__ __forceinline__ u32 above(float x) const {
        u32 hits = 0;
#if INPUT_BF16
        const u32 pair = bits_of(x) | bits_of(x) >> 16;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) hits |= bf16_pair_mask_above(word[w], pair) & 0x10001u << w;
#else
#pragma unroll
        for (int w = 0; w < WORDS; ++w) hits |= (float_of(word[w]) > x ? 1u : 0u) << w;
#endif
        return hits;
    }
    __device__ __forceinline__ static int number_of(int bit) {
        return INPUT_BF16 ? bit % 16 * 2 + bit / 16 : bit;
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

// The largest of all lanes' values, as ordered(): beyond +inf where one is NaN.
__device__ __forceinline__ u32 warp_max_or_nan(float x) {
#ifdef __CUDACC__
    return __reduce_max_sync(ALL_LANES, ordered(x));  // the hardware's maxima give a positive NaN
#else
    return __reduce_max_sync(ALL_LANES, is_nan(x) ? ~0u : ordered(x));
#endif
}

// One row of logits; numbers count from its start.
struct Row {
    const unsigned char* data;
    int size;
    int whole;  // logits to be read by vectors: all, or none where the row is not aligned

    __device__ __forceinline__ float raw(int i) const {
        const u32 bits = __ldg((const Logit*)data + i);
        return INPUT_BF16 ? bf16_low(bits) : float_of(bits);
    }
    // As a cleaned slice has it; beyond the row -inf.
    __device__ __forceinline__ float value(int i) const {
        return i < size ? cleaned(raw(i)) : -infinity();
    }
    // Asks for the unit that starts at `first`, a sector a lane at a time; save a short one.
    __device__ __forceinline__ void expect(int first) const {
        constexpr int SECTOR = 32 / sizeof(Logit);
        if (first + UNIT > size) return;
        const Logit* const from = (const Logit*)data + first + lane_id() * SECTOR;
#pragma unroll
        for (int i = 0; i < UNIT; i += SECTOR * WARP) prefetch_to_l2(from + i);
    }
    // The unit that starts at `first`; what lies beyond the row is -inf.
    __device__ __forceinline__ Slice load(int first) const {
        const int mine = first + lane_id() * VECTOR;
        const Logit* const from = (const Logit*)data + mine;
        Slice slice;
        if (first + UNIT <= whole) {
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) {
                const uint4 v = __ldg((const uint4*)from + j * WARP);
                slice.word[4 * j] = v.x, slice.word[4 * j + 1] = v.y;
                slice.word[4 * j + 2] = v.z, slice.word[4 * j + 3] = v.w;
            }
            return slice;
        }
        const int left = size - mine;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
#if INPUT_BF16
            const int low = w / 4 * WARP * VECTOR + w % 4 * 2;
            slice.word[w] = (low < left ? __ldg(from + low) : 0xff80u) |
                            (low + 1 < left ? __ldg(from + low + 1) : 0xff80u) << 16;
#else
            const int i = w / 4 * WARP * VECTOR + w % 4;
            slice.word[w] = i < left ? __ldg(from + i) : 0xff800000u;
#endif
        }
        return slice;
    }
};
