// A warp's weights on their way through its own ring in shared memory, and their product.
//
// A step is 32 outputs by 32 inputs of one expert, 576 bytes (moe_layout.py); SLOT_STEPS come at a
// time, by the copy engine or by the lanes. Lane 4 g + t multiplies them with inputs 8 t .. 8 t + 7 of
// rows g of each column tile, which are 16 bytes in a row of activations: they come straight to
// registers. So no thread waits for another's, and nothing but the ring goes through shared memory.
//
// An H200 reads a step in 34 cycles a multiprocessor, in which its warps issue 136 instructions: what
// is done for every step counts, and every address here is a register and a constant.
#pragma once

#include "moe_w4a16_int4.cuh"

constexpr int SCALE_LINES = (STEP_BYTES - SCALES_AT) / 16;
constexpr int SLOT_BYTES = SLOT_STEPS * STEP_BYTES;
// Steps of activations that are on their way; wide tiles have registers for no more than one.
constexpr int AHEAD = COLUMN_TILES > 2 ? 1 : 2;
static_assert(SLOT_STEPS % AHEAD == 0, "a step's registers are the same in every slot");
static_assert(!BY_LANES || SLOT_STEPS * SCALE_LINES <= WARP, "lanes for a slot's scales");

// Sums of 32 outputs by 8 columns a tile: sum[j][m][i] is fragment m's c[i] (mma.cuh) of tile j.
typedef float Sums[COLUMN_TILES][2][4];

// sum += a step's 32 outputs for the inputs in b. A weight is q = (n + 128) - 136: the products with
// -136, one for all outputs, go first. A group's scale goes on its 32 products' sum.
__device__ __forceinline__ void multiply_step(Sums& sum, const Fragment& zero, const Weights& w,
                                              const uint4 (&b)[COLUMN_TILES])
{
    const Fragment weights[2][2] = {{unpacked(w.q.x), unpacked(w.q.y)},
                                    {unpacked(w.q.z), unpacked(w.q.w)}};
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
        float base[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply_add(base, zero, b[j].x, b[j].y);
        multiply_add(base, zero, b[j].z, b[j].w);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float c[4] = {base[0], base[1], base[2], base[3]};
            multiply_add(c, weights[m][0], b[j].x, b[j].y);
            multiply_add(c, weights[m][1], b[j].z, b[j].w);
            const u32 scale = m ? w.scale.y : w.scale.x;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sum[j][m][i] += c[i] * (i < 2 ? bf16_low(scale) : bf16_high(scale));
        }
    }
}

// What a lane has, in a way that keeps the compiler from finding it anew each time, which is right
// where registers are scarce.
__device__ __forceinline__ u32 own_in_lane(u32 x)
{
    return COLUMN_TILES > 2 ? x : __shfl_sync(ALL_LANES, x, lane_id());
}

// One warp's slots, filled and read in turn: what comes next comes to where the oldest was. All are
// functions of a whole warp. BY_LANES: lanes copy, 16 bytes each, and wait for what they copied;
// otherwise a barrier a slot completes a phase when the copy engine has brought its bytes.
struct Ring {
    SharedAddress words, scales;  // the lane's of the first slot's first step
    SharedAddress landed;         // the first slot's barrier
    u32 lane;
    int apart;  // by lanes: from its words to the scales that it copies
    int oldest, parity;

    __device__ void open(unsigned char* memory, u64* barriers)
    {
        const SharedAddress slots = shared_address(memory);
        words = own_in_lane(slots + 16 * lane_id());
        scales = own_in_lane(slots + SCALES_AT + 8 * (lane_id() / 4));
        landed = same_in_warp(shared_address(barriers));
        lane = own_in_lane(lane_id());
        const int step = (int)lane / SCALE_LINES, line = (int)lane % SCALE_LINES;
        apart = step * STEP_BYTES + SCALES_AT + 16 * line - 16 * (int)lane;
        if (!BY_LANES && lane_id() == 0) {
            for (int i = 0; i < SLOTS; ++i) barrier_init(landed + 8 * i, 1);
            order_before_copies();
        }
        oldest = 0;
        parity = 1;  // until each has been filled once
        __syncwarp();
    }
    // What a lane that copies adds to where a step lies.
    __device__ static int place() { return BY_LANES ? 16 * lane_id() : 0; }

    // A slot's steps, 0 when there are no more, from their place on. All lanes have read what was
    // there, and met since.
    __device__ void bring(const unsigned char* from, int steps)
    {
        const SharedAddress to = words + oldest * SLOT_BYTES;
        if (BY_LANES) {
#pragma unroll
            for (int i = 0; i < SLOT_STEPS; ++i)
                if (i < steps) copy_line_async(to + i * STEP_BYTES, from + i * STEP_BYTES);
            if ((int)lane < SCALE_LINES * steps) copy_line_async(to + apart, from + apart);
            end_group();
        } else if (steps > 0 && lane == 0) {
            barrier_arrive_expecting(landed + 8 * oldest, steps * STEP_BYTES);
            copy_run_async(to, from, steps * STEP_BYTES, landed + 8 * oldest);
        }
        if (++oldest == SLOTS) {
            oldest = 0;
            parity ^= 1;
        }
    }
    // Until the oldest has landed.
    __device__ void wait() const
    {
        if (BY_LANES) {
            wait_for_groups<SLOTS - 1>();
            __syncwarp();
        } else {
            barrier_wait(landed + 8 * oldest, parity);
        }
    }
    // A step of the slot.
    __device__ Weights step(int slot, int i) const
    {
        const int at = slot * SLOT_BYTES + i * STEP_BYTES;
        return {shared_vector(words + at), load_two(scales + at)};
    }
};
