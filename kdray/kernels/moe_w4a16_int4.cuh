// A step of INT4 weights, 32 outputs by 32 inputs of one expert (moe_layout.py), as a warp multiplies
// it: from shared memory to fragments.
#pragma once

#include "common.cuh"
#include "mma.cuh"

constexpr int STEP = 32;
constexpr int STEP_BYTES = 576;
constexpr int SCALES_AT = 512;

#ifdef __CUDACC__

// (word & 0x000f000f) | 0x43004300, which takes the compiler two instructions.
__device__ __forceinline__ u32 nibble_pair(u32 word)
{
    u32 pair;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(pair) : "r"(word), "r"(0x000f000f), "r"(0x43004300));
    return pair;
}
__device__ __forceinline__ uint2 load_two(SharedAddress from)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ u32 load_word(SharedAddress from)
{
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ u32 load_half(SharedAddress from)
{
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
    return x;
}

#else

inline u32 load_word(SharedAddress from) { return *(const u32*)simt::shared_pointer(from, 4); }
inline u32 load_half(SharedAddress from) { return *(const u16*)simt::shared_pointer(from, 2); }
inline u32 nibble_pair(u32 word) { return (word & 0x000f000fu) | 0x43004300u; }
inline uint2 load_two(SharedAddress from) { return *(const uint2*)simt::shared_pointer(from, 8); }

#endif

// Eight nibbles n to fragment A of n + 128: 0x4300 | n is that as bf16, exactly.
struct Fragment {
    u32 a[4];
};
__device__ __forceinline__ Fragment unpacked(u32 word)
{
    return {{nibble_pair(word), nibble_pair(word >> 4), nibble_pair(word >> 8),
             nibble_pair(word >> 12)}};
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const Fragment& a, u32 b0, u32 b1)
{
    multiply_add(c, a.a[0], a.a[1], a.a[2], a.a[3], b0, b1);
}

constexpr u32 MINUS_136 = 0xc308c308u;  // bf16, twice

// What a lane multiplies of a step: weights, and its outputs' scales.
struct Weights {
    uint4 q;
    uint2 scale;
};
