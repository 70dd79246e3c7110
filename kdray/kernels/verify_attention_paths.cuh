// What plan_paths and verify_attention_invariant share: which keys a row sees, and who sees them too.
//
// A row's path is the keys that it sees in the order of their positions, wherever they lie: behind
// the last known token those of its ancestors. It is cut into segments of 128 keys, twice as many
// from 8,193 on, four times from 16,385, ..: at most 64 of them.
//
// An item is up to eight heads of a row: item i is heads 8 (i % E) .. of row i / E, E = ceil(H / 8). A
// launch has up to 128 of them.
#pragma once

#include "verify_attention_batch.cuh"

constexpr int SEGMENTS = 64;        // of a path, at most
constexpr int FIRST_SEGMENT = 128;  // keys
constexpr int GROUP = 4;            // items that may share keys
constexpr int MOST_ITEMS = 128;     // of a launch
constexpr int MOST_UNITS = MOST_ITEMS * SEGMENTS;

// What a row sees: `keys` keys, of which the first `limit` lie at their positions and the others
// where `path` says; segments of FIRST_SEGMENT << shift. keys 0: padding.
struct alignas(16) PathInfo {
    int request;
    int limit;
    int keys;
    int shift;

    __device__ int segment() const { return FIRST_SEGMENT << shift; }
    __device__ int segments() const { return (keys + segment() - 1) / segment(); }
};

__device__ __forceinline__ PathInfo load_info(const PathInfo* at) {
    const int4 x = *(const int4*)at;
    return {x.x, x.y, x.z, x.w};
}

// Items that see the same keys of a segment.
struct Unit {
    int item;  // of the launch: the first
    int count;
    int segment;

    __device__ static Unit unpacked(int x) { return {x >> 16, x >> 8 & 255, x & 255}; }
    __device__ int packed() const { return item << 16 | count << 8 | segment; }
};
