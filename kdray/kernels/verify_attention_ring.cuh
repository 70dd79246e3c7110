// Cache rows on their way into shared memory: a ring of SLOTS slots of STEP keys each, filled by
// the copy engine. A slot's rows lie an odd number of 16-byte chunks apart, so that eight keys'
// chunks of one place lie in different banks and every address is a base and a constant. Where the
// cache's rows lie as far apart and a step's keys in one page, they come as one run of bytes; else
// each comes by itself.
//
// The value warps take turns: warp w brings the steps of the block whose number is w modulo 8.
#pragma once

#include "overlap.cuh"
#include "verify_attention_shared.cuh"

struct Ring {
    Shared& s;
    const Attention& in;

    __device__ static u32 lane() { return fresh_thread() % WARP; }
    __device__ static u32 warp() { return fresh_thread() / WARP - SCORE_WARPS; }
    __device__ bool mine(u32 step) const { return step % VALUE_WARPS == warp(); }

    __device__ int tile_step(u32 step) const { return step - s.first_step + s.piece.begin; }
    // Of the lane's key. Behind the last key that one comes again: no row sees it there, but a
    // weight of 0 must not meet what is no number.
    __device__ int position(u32 step) const {
        return min(tile_step(step) * STEP + (int)lane(), s.piece.keys - 1);
    }

    // Whether all its keys are of positions before the request's rows.
    __device__ bool is_cached(u32 step) const {
        return (tile_step(step) + 1) * STEP <= s.piece.cached;
    }

    // The pages of the warp's first step: to be called before the first bring of a piece.
    __device__ void begin() const {
        ask(s.first_step + (warp() - s.first_step) % VALUE_WARPS);
    }
    // Where the keys of a step that the warp brings lie; there when it brings it.
    __device__ void ask(u32 step) const {
        if (step >= s.end_step || lane() >= STEP) return;
        copy_word_async(shared_address(&s.page[warp()][lane()]),
                        in.page_table + (i64)s.piece.request * in.batch_pages +
                            (position(step) >> in.page_shift));
    }

    // A step of the warp's. Waits until all have done with the slot.
    __device__ void bring(u32 step) const {
        const u32 slot = slot_of(step);
        const SharedAddress landed = shared_address(&s.landed[slot]);
        const SharedAddress to = shared_address(s.ring) + slot * SLOT_BYTES;
        wait_for_copies();
        const i64 page = s.page[warp()][lane() % STEP];
        const i64 row = (page << in.page_shift) + (position(step) & ((1 << in.page_shift) - 1));
        const unsigned char* const from = in.cache + row * in.cache_row_bytes;
        const bool as_one = in.cache_row_bytes == STRIDE && (1 << in.page_shift) >= STEP &&
                            (tile_step(step) + 1) * STEP <= s.piece.keys;
        barrier_wait(shared_address(&s.freed[slot]), phase_of(step) ^ 1);
        __syncwarp();
        if (as_one) {
            if (lane() == 0) {
                barrier_arrive_expecting(landed, SLOT_BYTES);
                copy_run_async(to, from, SLOT_BYTES, landed);
            }
        } else {
            if (lane() == 0) barrier_arrive_expecting(landed, STEP * ROW_BYTES);
            __syncwarp();
            if (lane() < STEP) copy_run_async(to + lane() * STRIDE, from, ROW_BYTES, landed);
        }
        ask(step + VALUE_WARPS);
    }
};
