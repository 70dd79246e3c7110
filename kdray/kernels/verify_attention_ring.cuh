// Cache rows on their way into shared memory: a ring of SLOTS slots of STEP keys each, filled by
// the copy engine, one run of bytes a key. A slot's rows lie an odd number of 16-byte chunks apart,
// so that eight keys' chunks of one place lie in different banks and every address is a base and a
// constant. The chunk between two rows is not copied to: extra rows' weights lie there.
//
// Every warp starts its own keys' copies, as the copy engine takes one lane's request at a time: 16
// lanes of one warp would hold that one up, and with it all that wait for it.
#pragma once

#include "mma.cuh"
#include "verify_attention_work.cuh"

constexpr int STEP = 16;  // keys: the k of one product with the values
constexpr int SLOTS = 4;
constexpr int ROW_BYTES = 2 * (LATENT + ROPE);
constexpr int STRIDE = ROW_BYTES + 16;
constexpr int SLOT_BYTES = STEP * STRIDE;
constexpr int KEYS_A_WARP = STEP / WARPS;
static_assert(ROW_BYTES % 32 == 0 && STEP % WARPS == 0, "odd strides; keys for every warp");

// Keys of a piece, brought by all warps: KEYS_A_WARP of a step each, one a lane. Steps are counted
// from the piece's first, so a step's number tells its slot and its barrier's phase. Copies of
// several steps at once: lanes take their keys one step after the other.
struct Ring {
    SharedAddress slots;
    SharedAddress landed;  // [SLOTS] barriers of WARPS arrivals
    const unsigned char* cache;
    u32 row_bytes;
    const int* pages;  // of the request
    int page_shift;
    u32 page_mask;  // of a position: its place in its page
    int count;  // positions from here on are no keys of the tile
    int begin;  // the tile's step that the piece starts with

    __device__ static u32 slot(u32 i) { return i % SLOTS; }
    __device__ SharedAddress slot_at(u32 i) const { return slots + slot(i) * SLOT_BYTES; }
    __device__ SharedAddress barrier_at(u32 i) const { return landed + 8 * slot(i); }
    __device__ void wait(u32 i) const { barrier_wait(barrier_at(i), i / SLOTS % 2); }

    // Of the lane's key of step i. Behind the last key that one comes again: no row sees it there,
    // but a weight of 0 must not meet what is no number.
    __device__ int position(u32 warp, u32 lane, u32 i) const {
        const int key = warp * KEYS_A_WARP + lane % KEYS_A_WARP;
        return min((begin + (int)(i + lane / KEYS_A_WARP)) * STEP + key, count - 1);
    }
    // The page that it lies in: asked for a turn before it is needed.
    __device__ int page_of(u32 warp, u32 lane, u32 i) const {
        return pages[(u32)position(warp, lane, i) >> page_shift];
    }

    // Starts the copies of steps i .. i + STEPS - 1, all of them the piece's; page as page_of gave.
    template <int STEPS>
    __device__ void bring(u32 warp, u32 lane, u32 i, int page) const {
        if (lane >= STEPS * KEYS_A_WARP) return;
        const u32 own = STEPS == 1 ? i : i + lane / KEYS_A_WARP;
        const u32 key = STEPS == 1 ? lane : lane % KEYS_A_WARP;
        if (key == 0) barrier_arrive_expecting(barrier_at(own), KEYS_A_WARP * ROW_BYTES);
        const u32 row = ((u32)page << page_shift) + (position(warp, lane, i) & page_mask);
        copy_run_async(slot_at(own) + (warp * KEYS_A_WARP + key) * STRIDE,
                       cache + (u64)row * row_bytes, ROW_BYTES, barrier_at(own));
    }
};
