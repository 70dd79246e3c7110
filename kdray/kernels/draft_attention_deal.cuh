// How draft_attention's work is cut and dealt out, on the device, from the lengths of this step.
//
// A request's keys are its context, or what a window leaves of it, and behind that the block's own;
// they are taken in steps of STEP. All requests' steps are cut into pieces of nearly one length,
// for every key head alike, and a block takes one piece of one head. So one long context is spread
// over the device, however short the others are.
#pragma once

#include "common.cuh"

constexpr int WARPS = ROW_TILES > 4 ? 8 : 4;
constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = 16 * ROW_TILES;  // of a key head: block slots by query heads, padded
constexpr int STEP = 64;              // keys
constexpr int MAX_PIECES = 32;        // of a request: a lane each when they are merged

__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP; }

// The launch's integers.
struct Batch {
    const int* end;         // [R]
    const int* page_table;  // [R, pages]
    int num_requests;
    int slots;  // of a block
    int pages;
    int page_shift;
    int causal;
    int window;
    int pieces;  // that the keys of all requests are cut into, about
    int least;   // steps of a piece, but for what is left over
};

// A request's keys: positions first .. last - 1, those from `end` on the block's own.
struct Span {
    int first;
    int end;
    int last;

    __device__ int steps() const { return (last - first + STEP - 1) / STEP; }
};

__device__ __forceinline__ Span span_of(const Batch& batch, int r) {
    // Whatever the length says, nothing beyond the page table is read.
    const int end = min(max(batch.end[r], 0), batch.pages << batch.page_shift);
    return {max(end - batch.window + 1, 0), end, end + batch.slots};
}

// Whether the block's slot `slot` sees the key at a position.
__device__ __forceinline__ bool sees(const Batch& batch, const Span& span, int slot, int position) {
    const int ahead = position - (span.end + slot);
    const bool near = ahead < batch.window && -ahead < batch.window;
    return position < span.last && near && (!batch.causal || ahead <= 0);
}

// Whether some slot does not see some key of `count` from a position on.
__device__ __forceinline__ bool hides(const Batch& batch, const Span& span, int position,
                                      int count) {
    const bool meets_block = position + count > span.end;
    return meets_block || position <= span.last - 1 - batch.window;
}

// Steps begin .. end - 1 of a request. Pieces of requests that have several leave their parts in
// the workspace's slots first_slot .. + count - 1.
struct Piece {
    int request;
    int begin;
    int end;
    int number;
    int count;
    int first_slot;

    __device__ bool whole() const { return count == 1; }
    __device__ int slot() const { return first_slot + number; }
};

// Steps a piece has at most: with T steps in all, pieces * length >= T, so there are at most
// pieces + R of them, and less than 2 * pieces of requests that have several.
__device__ __forceinline__ int piece_length(const Batch& batch) {
    int total = 0, longest = 0;
    for (int r = lane_id(); r < batch.num_requests; r += WARP) {
        const int steps = span_of(batch, r).steps();
        total += steps;
        longest = max(longest, steps);
    }
    total = __reduce_add_sync(ALL_LANES, total);
    longest = __reduce_max_sync(ALL_LANES, longest);
    const int shared = (total + batch.pieces - 1) / batch.pieces;
    return max(max(shared, batch.least), (longest + MAX_PIECES - 1) / MAX_PIECES);
}

__device__ __forceinline__ int inclusive_sum(int x) {
#pragma unroll
    for (int by = 1; by < WARP; by *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, x, by);
        if (lane_id() >= by) x += other;
    }
    return x;
}

// Piece `number` of all; count 0 where there are not so many. Every warp finds it for itself.
__device__ __forceinline__ Piece deal_piece(const Batch& batch, int number) {
    const int length = piece_length(batch);
    int pieces_before = 0, slots_before = 0;
    for (int base = 0; base < batch.num_requests; base += WARP) {
        const int r = base + lane_id();
        const int steps = r < batch.num_requests ? span_of(batch, r).steps() : 0;
        const int pieces = (steps + length - 1) / length, slots = pieces > 1 ? pieces : 0;
        const int pieces_to = pieces_before + inclusive_sum(pieces);
        const int slots_to = slots_before + inclusive_sum(slots);
        const u32 reached = __ballot_sync(ALL_LANES, number < pieces_to);
        if (reached) {
            const int owner = __ffs(reached) - 1;
            const int count = __shfl_sync(ALL_LANES, pieces, owner);
            const int own_steps = __shfl_sync(ALL_LANES, steps, owner);
            const int own = number - (__shfl_sync(ALL_LANES, pieces_to, owner) - count);
            const int first_slot = __shfl_sync(ALL_LANES, slots_to - slots, owner);
            return {base + owner, own_steps * own / count, own_steps * (own + 1) / count,
                    own,          count,                   first_slot};
        }
        pieces_before = __shfl_sync(ALL_LANES, pieces_to, WARP - 1);
        slots_before = __shfl_sync(ALL_LANES, slots_to, WARP - 1);
    }
    return {0, 0, 0, 0, 0, 0};
}
