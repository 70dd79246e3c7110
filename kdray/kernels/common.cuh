// What several kernels share: short type names, float order as integers, and the few instructions
// that C++ has no name for. Each of those has a plain twin, so that a kernel's own source also runs
// on a CPU (where __CUDACC__ is not defined and the shim provides the warp functions).
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
constexpr int SCORE_ABSENT = -2147483647 - 1;  // core/tree.py: ABSENT
constexpr float LARGEST_FLOAT = 3.402823466e38f;

#ifdef __CUDACC__

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u64 bits_of(double x) { return (u64)__double_as_longlong(x); }
__device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ double double_of(u64 bits) { return __longlong_as_double((i64)bits); }
// To the nearest integer, halves to even; saturates.
__device__ __forceinline__ int round_to_int(float x) { return __float2int_rn(x); }
__device__ __forceinline__ int round_to_int(double x) { return __double2int_rn(x); }
// What other blocks of this launch wrote: past L1, which is not coherent.
template <class T>
__device__ __forceinline__ T load_shared_by_blocks(const T* address) {
    return __ldcg(address);
}
// Adds to a counter of all blocks, giving the old value: what this thread knows of before is known
// to whoever sees the new value, and the other way round.
__device__ __forceinline__ int add_acquire_release(int* address, int by) {
    int old;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(address), "r"(by)
                 : "memory");
    return old;
}
// float32 arithmetic that no optimisation may fuse or reorder.
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float minus(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
// 2^x within 2^-22 of itself; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// log2 x within 2^-22, absolute between 1/2 and 2 and else relative.
__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Maxima that are NaN where an operand is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ u32 bf16_pair_max_or_nan(u32 a, u32 b) {
    u32 c;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
// 1 or 0 (as bf16) for each half of a that exceeds that of b; and sums of halves.
__device__ __forceinline__ u32 bf16_pair_above(u32 a, u32 b) {
    u32 c;
    asm("set.gt.bf16x2.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ u32 bf16_pair_sum(u32 a, u32 b) {
    u32 c;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

#else

template <class To, class From>
inline To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "same_bits");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline u32 bits_of(float x) { return same_bits<u32>(x); }
inline u64 bits_of(double x) { return same_bits<u64>(x); }
inline float float_of(u32 bits) { return same_bits<float>(bits); }
inline double double_of(u64 bits) { return same_bits<double>(bits); }
inline int round_to_int(double x) {
    x = nearbyint(x);
    return x != x ? 0 : x >= 2147483647.0 ? 2147483647 : x <= -2147483648.0 ? SCORE_ABSENT : (int)x;
}
inline int round_to_int(float x) { return round_to_int((double)x); }
template <class T>
inline T load_shared_by_blocks(const T* address) {
    return *address;
}
inline int add_acquire_release(int* address, int by) { return (*address += by) - by; }
inline float plus(float a, float b) { return a + b; }
inline float minus(float a, float b) { return a - b; }
inline float multiply(float a, float b) { return a * b; }
inline float divide(float a, float b) { return a / b; }
inline float log2_fast(float x) { return log2f(x); }
inline float exp2_fast(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
inline float max_or_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
inline u32 bf16_pair_max_or_nan(u32 a, u32 b) {
    const float low = max_or_nan(float_of(a << 16), float_of(b << 16));
    const float high = max_or_nan(float_of(a & 0xffff0000u), float_of(b & 0xffff0000u));
    return bits_of(low) >> 16 | (bits_of(high) & 0xffff0000u);
}
inline u32 bf16_pair_above(u32 a, u32 b) {
    const bool low = float_of(a << 16) > float_of(b << 16);
    const bool high = float_of(a & 0xffff0000u) > float_of(b & 0xffff0000u);
    return (low ? 0x3f80u : 0u) | (high ? 0x3f800000u : 0u);
}
inline u32 bf16_pair_sum(u32 a, u32 b) {  // exact where the kernels use it
    const float low = float_of(a << 16) + float_of(b << 16);
    const float high = float_of(a & 0xffff0000u) + float_of(b & 0xffff0000u);
    return bits_of(low) >> 16 | (bits_of(high) & 0xffff0000u);
}

#endif

__device__ __forceinline__ float infinity() { return float_of(0x7f800000u); }
__device__ __forceinline__ bool is_nan(float x) { return x != x; }

// Floats in their order as unsigned integers; -0 stands just below +0.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = bits_of(x);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float from_ordered(u32 key) {
    return float_of(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ float bf16_low(u32 pair) { return float_of(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return float_of(pair & 0xffff0000u); }

// Two floats as bfloat16, the first in the low half; to nearest, halves to even.
#ifdef __CUDACC__
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#else
inline u32 bf16_bits(float x) {
    const u32 bits = bits_of(x);
    return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
inline u32 bf16_pair(float low, float high) { return bf16_bits(high) << 16 | bf16_bits(low); }
#endif

__device__ __forceinline__ float silu(float x) {
    constexpr float LOG2_E = 1.44269504088896341f;
    return divide(x, 1.0f + exp2_fast(-x * LOG2_E));
}

__device__ __forceinline__ int lane_id() { return threadIdx.x % WARP; }
