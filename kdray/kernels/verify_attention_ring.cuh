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
    i64 row_bytes;
    const int* pages;  // of the request
    int page_shift;
    int count;
};

// The ring as one warp sees it: the warp brings two keys of every step. Steps are counted over the
// whole life of the block, so a step's number tells its slot and its barrier's phase.
struct Ring {
    SharedAddress slots;
    SharedAddress landed;  // [SLOTS] barriers of THREADS arrivals

    __device__ static int slot(int count) { return count % SLOTS; }

    __device__ SharedAddress slot_at(int count) const {
        return slots + slot(count) * SLOT_BYTES;
    }

    // Cache row of this lane's key: lanes 0 .. 15 look after the warp's first, the others after its
    // second. The page table's next entries are called into L1 on the way.
    __device__ static int row_of(const Keys& keys, u32 thread, int step) {
        const int position = step * STEP + 2 * (thread / WARP) + thread % WARP / 16;
        if (position >= keys.count) return 0;
        const int* const entry = keys.pages + (position >> keys.page_shift);
        const int ahead = min(position + AHEAD, keys.count - 1);
        prefetch(keys.pages + (ahead >> keys.page_shift));
        return (*entry << keys.page_shift) + (position & ((1 << keys.page_shift) - 1));
    }

    // Starts the copies of a step; positions behind the last give zeros.
    __device__ void bring(const Keys& keys, u32 thread, int step, int count) const {
        const u32 lane = thread % WARP, key = thread / WARP * 2;
        const int own_row = row_of(keys, thread, step);
        const int row = __shfl_sync(ALL_LANES, own_row, 0);
        const int row_after = __shfl_sync(ALL_LANES, own_row, 16);
        const int left = keys.count - step * STEP - (int)key;
        const SharedAddress to = slot_at(count) + key * STRIDE;
#pragma unroll
        for (int base = 0; base < 2 * ROW_CHUNKS; base += WARP) {
            const u32 i = base + lane;
            const u32 which = i >= ROW_CHUNKS, chunk = i - (which ? ROW_CHUNKS : 0);
            if (i < 2 * ROW_CHUNKS) {
                const i64 from = (which ? row_after : row) * keys.row_bytes + 16 * chunk;
                const SharedAddress place = (chunk ^ ((key + which) % 8)) * 16;
                copy_async(to + which * STRIDE + place, keys.cache + from, (int)which < left);
            }
        }
        barrier_arrive_after_copies(landed + 8 * slot(count));
    }

    __device__ void wait(int count) const {
        barrier_wait(landed + 8 * slot(count), count / SLOTS % 2);
    }
};
