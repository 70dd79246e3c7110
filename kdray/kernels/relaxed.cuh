// Words that go to, and come from, another block of the same launch: each is whole by itself, in no
// order. Whether one is there shows in the word.
#pragma once

#include "common.cuh"

#ifdef __CUDACC__

__device__ __forceinline__ void store_relaxed(uint4* to, const uint4& v)
{
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ void store_relaxed(u16* to, u16 x)
{
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(x) : "memory");
}
__device__ __forceinline__ uint4 load_relaxed(const uint4* from)
{
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ u32 load_relaxed(const u32* from)
{
    u32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

#else

inline void store_relaxed(uint4* to, const uint4& v) { *to = v; }
inline void store_relaxed(u16* to, u16 x) { *(volatile u16*)to = x; }
inline uint4 load_relaxed(const uint4* from) { return *from; }
inline u32 load_relaxed(const u32* from) { return *(const volatile u32*)from; }

#endif
