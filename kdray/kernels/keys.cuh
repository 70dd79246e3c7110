// A value with its token as one integer: the larger key has the larger value or, of equal values,
// the lower id. So a maximum over keys, in any order, breaks ties as the contract does.
#pragma once

#include "common.cuh"

constexpr u64 NO_KEY = 0;  // below every key
constexpr int NO_ID = 0x7fffffff;

__device__ __forceinline__ u64 make_key(float value, int id) {
    value = value == infinity() ? LARGEST_FLOAT : value + 0.0f;  // -0 is 0
    return (u64)ordered(value) << 32 | (u32)~id;
}
__device__ __forceinline__ float key_value(u64 key) { return from_ordered((u32)(key >> 32)); }
__device__ __forceinline__ int key_id(u64 key) { return (int)~(u32)key; }
__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }
