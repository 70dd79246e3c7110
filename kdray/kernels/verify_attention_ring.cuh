// Cache rows on their way into shared memory: a ring of SLOTS slots of STEP keys each, filled by
// asynchronous copies. A key's row lies in STRIDE bytes, its 16-byte chunks exchanged by the low
// bits of the key's number, so that eight keys' chunks of one place lie in different banks.
#pragma once

#include "mma.cuh"
#include "verify_attention_work.cuh"

constexpr int STEP = 16;  // keys: the k of one product with the values
constexpr int SLOTS = 4;
constexpr int ROW_CHUNKS = (LATENT + ROPE) / 8;
constexpr int STRIDE = (ROW_CHUNKS + 7) / 8 * 128;
constexpr int SLOT_BYTES = STEP * STRIDE;
constexpr int AHEAD = 8 * STEP;  // positions by which the page table is read ahead

// Where a tile's keys lie.
struct Keys {
    const unsigned char* cache;
    u32 row_bytes;
    const int* pages;  // of the request
    int page_shift;
    int count;
};

// 16 threads bring a key. Steps are counted from the piece's first, so a step's number tells its
// slot and its barrier's phase.
struct Ring {
    SharedAddress slots;
    SharedAddress landed;  // [SLOTS] barriers of THREADS arrivals

    __device__ static u32 slot(u32 i) { return i % SLOTS; }
    __device__ SharedAddress slot_at(u32 i) const { return slots + slot(i) * SLOT_BYTES; }

    // Starts the copies of step `step` of the tile, the i-th of the piece; positions behind the
    // last give zeros.
    __device__ void bring(const Keys& keys, u32 thread, int step, u32 i) const {
        constexpr u32 ABREAST = THREADS / STEP;
        const u32 lane = thread % ABREAST, key = thread / ABREAST;
        const int position = step * STEP + (int)key;
        const bool there = position < keys.count;
        const unsigned char* from = keys.cache + 16 * lane;
        if (there) from += (u64)row_of(keys, position) * keys.row_bytes;
        if (thread == 0) prefetch(entry_of(keys, min(position + AHEAD, keys.count - 1)));
        const SharedAddress to = slot_at(i) + key * STRIDE + (lane ^ key % 8) * 16;
#pragma unroll
        for (u32 chunk = 0; chunk < ROW_CHUNKS; chunk += ABREAST)
            if (chunk + ABREAST <= ROW_CHUNKS || chunk + lane < ROW_CHUNKS)
                copy_async(to + 16 * chunk, from + 16 * chunk, there);
        barrier_arrive_after_copies(landed + 8 * slot(i));
    }

    __device__ static const int* entry_of(const Keys& keys, int position) {
        return keys.pages + (position >> keys.page_shift);
    }
    __device__ static u32 row_of(const Keys& keys, int position) {
        const int within = position & ((1 << keys.page_shift) - 1);
        return (*entry_of(keys, position) << keys.page_shift) + within;
    }

    __device__ void wait(u32 i) const { barrier_wait(landed + 8 * slot(i), i / SLOTS % 2); }
};
